"""Who waits where, when a call to the workers has not ended in time: each rank's state and stack, in one file."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podium.protocol import WorkerTimeout

STACKS = "stacks"
"""Folder of a run directory; a rank's process dumps its stacks to its file there on SIGUSR1."""

_ANSWER_S = 2.0


@contextmanager
def blaming(run_dir: Path) -> Iterator[None]:
    """Adds where the report is to a `WorkerTimeout` that passes; to be used where the late ranks are still there."""
    try:
        yield
    except WorkerTimeout as error:
        error.add_note(f"what each rank is doing: {blame(run_dir, error)}")
        raise


def blame(run_dir: Path, error: Exception) -> Path:
    """Writes a report on every rank that is on this machine to ``blame.txt`` in `run_dir`; returns where.

    It begins with the error, which names call, phase, silent ranks and the key of the deadline, and its notes.
    """
    files = {int(match[1]): path for path in (run_dir / STACKS).glob("*.txt") if (match := _PID.search(path.name))}
    sizes = {pid: path.stat().st_size for pid, path in files.items()}
    asked = [pid for pid in files if _ask(pid)]
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until and any(files[pid].stat().st_size == sizes[pid] for pid in asked):
        time.sleep(0.05)
    parts = ["\n".join([str(error), *getattr(error, "__notes__", [])])]
    for pid, path in sorted(files.items(), key=lambda item: item[1].name):
        text = path.read_text(errors="replace")[sizes[pid] :].strip()
        parts.append(f"== {_doing(path, pid)}\n{text or '(no stack: the process did not answer)'}")
    report = run_dir / "blame.txt"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return report


_PID = re.compile(r"_pid_(\d+)\.txt$")


def _doing(stacks: Path, pid: int) -> str:
    """The rank, its process and its state; and what it is at, for how long."""
    try:
        line = stacks.with_suffix(".doing").read_text(encoding="utf-8").partition("\n")[0]
    except FileNotFoundError:
        return f"{stacks.stem}: {_state(pid)}"
    since, _, rest = line.partition(" ")
    rank, _, what = rest.partition("\t")
    return f"{rank} (process {pid}): {_state(pid)}, {what} for {time.time() - float(since):.1f} s"


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
