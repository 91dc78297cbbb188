"""Checkpoints on disk: written beside, renamed, then marked."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from podium.protocol import WorkerGroup

LATEST = "latest_checkpointed_iteration.txt"


def write_checkpoint(run_dir: Path, step: int, roles: dict[str, WorkerGroup], driver: dict[str, Any]) -> Path:
    """Saves every trained role and the driver's state as ``global_step_N``; a crash leaves the previous one whole.

    Args:
        roles: trained roles by name; each writes a folder of that name.
        driver: JSON-able state of the driver.
    """
    final = (run_dir / f"global_step_{step}").resolve()
    beside = final.with_name(final.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name, group in roles.items():
        group.save_checkpoint(str(beside / name))
    _write_synced(beside / "trainer.json", json.dumps(driver, indent=2) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    marker = run_dir / LATEST
    _write_synced(marker.with_suffix(".tmp"), f"{step}\n")
    marker.with_suffix(".tmp").replace(marker)
    return final


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
