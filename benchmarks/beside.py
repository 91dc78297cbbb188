"""Measuring Podium and a peer in turn, each measurement in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def measure_apart(python: str, script: str, library: str, name: str, options: list[str]) -> dict[str, Any]:
    """Runs ``script --worker library name options``, which prints one JSON object, with one thread.

    Args:
        python: of the environment that has `library`.

    Raises:
        SystemExit: the measurement failed; with what it wrote.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT) if library == "podium" else ""}
    command = [python, script, "--worker", library, name, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {library} {name} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])
