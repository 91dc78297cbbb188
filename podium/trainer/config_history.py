"""Which configuration computed which step: a run that goes on may have another one than before."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.utils.errors import UserError

_FILE = "configs.jsonl"


def note_config(run_dir: Path, after: int, config: Mapping[str, Any]) -> None:
    """From here on the steps after `after` are computed with `config`, whatever computed them before.

    Args:
        config: plain values, without secrets.
    """
    rows = [row for row in _rows(run_dir) if row["after"] < after]
    row = json.loads(json.dumps({"after": after, "config": config}, default=str))
    if not rows or rows[-1]["config"] != row["config"]:
        rows.append(row)
    beside = run_dir / (_FILE + ".tmp")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    beside.replace(run_dir / _FILE)


def config_at(run_dir: Path, step: int) -> tuple[Mapping[str, Any], int]:
    """The configuration of a step, and the last step that had another one (or none).

    Raises:
        UserError: the run has no such step.
    """
    rows = [row for row in _rows(run_dir) if row["after"] < step]
    if not rows:
        raise UserError(
            f"{run_dir / _FILE} has no configuration for step {step}: the run began later, or is no PPO run"
        )
    return rows[-1]["config"], rows[-1]["after"]


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / _FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
