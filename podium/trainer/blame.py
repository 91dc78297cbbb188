"""Who waits where, when a call to the workers has not ended in time: each rank's state and stack, in one file."""

import os
import re
import signal
import time
from pathlib import Path

STACKS = "stacks"
"""Folder of a run directory; a rank's process dumps its stacks to its file there on SIGUSR1."""

_ANSWER_S = 2.0


def blame(run_dir: Path, error: Exception) -> Path:
    """Writes a report on every rank that is on this machine to ``blame.txt`` in `run_dir`; returns where."""
    files = {int(match[1]): path for path in (run_dir / STACKS).glob("*.txt") if (match := _PID.search(path.name))}
    sizes = {pid: path.stat().st_size for pid, path in files.items()}
    asked = [pid for pid in files if _ask(pid)]
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until and any(files[pid].stat().st_size == sizes[pid] for pid in asked):
        time.sleep(0.05)
    parts = [str(error)]
    for pid, path in sorted(files.items(), key=lambda item: item[1].name):
        text = path.read_text(errors="replace")[sizes[pid] :].strip()
        parts.append(f"== {path.stem}: {_state(pid)}\n{text or '(no stack: the process did not answer)'}")
    report = run_dir / "blame.txt"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return report


_PID = re.compile(r"_pid_(\d+)\.txt$")


def _ask(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return False
    return True


def _state(pid: int) -> str:
    """As the kernel says it: ``S (sleeping)``, ``T (stopped)``, ...; ``ended`` for a process that is not there."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "ended"
    return next((line.split(":", 1)[1].strip() for line in status.splitlines() if line.startswith("State:")), "unknown")
