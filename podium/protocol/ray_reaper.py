"""Ends the Ray that a driver started when the driver is gone without having ended it (SIGKILL), or gives it up.

Run by its path, with the driver's process id, and with a pipe from the driver as standard input: where the pipe ends
without a word before it, the driver has ended. Ray's own processes notice by themselves too, but take their time.
Standard library only: it must start in no time and weigh nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import NamedTuple

_ROUNDS, _PAUSE_S = 100, 0.02


class _Process(NamedTuple):
    state: str
    parent: int
    group: int
    start: str


def _table() -> dict[int, _Process]:
    """Every process by its id."""
    out = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
            out[int(name)] = _Process(fields[0], int(fields[1]), int(fields[2]), fields[19])
    return out


def _is_ray(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            command = f.read()
    except OSError:
        return False
    return b"/ray/" in command or command.startswith(b"ray::")


def _ray_of(driver: int) -> dict[int, _Process]:
    """The driver's Ray children and everything below them."""
    table = _table()
    found = {pid for pid, process in table.items() if process.parent == driver and _is_ray(pid)}
    found.discard(os.getpid())
    while more := {pid for pid, process in table.items() if process.parent in found} - found:
        found |= more
    return {pid: table[pid] for pid in found}


def main() -> None:
    """Watch until the pipe says something or ends."""
    driver = int(sys.argv[1])
    seen: dict[int, _Process] = {}
    while not select.select([0], [], [], 1.0)[0]:
        seen = _ray_of(driver) or seen
    if os.read(0, 1):
        return
    for _ in range(_ROUNDS):  # what is about to end may have started more since the last look
        seen.update(_ray_of(driver))  # a driver that was interrupted while Ray started is still there
        if not _kill(seen):
            return
        time.sleep(_PAUSE_S)


def _kill(seen: dict[int, _Process]) -> bool:
    """Kill those of ``seen`` that live, and what they started; whether there was any."""
    # A rank leads a process group of its own: what it started since the last look is in there.
    groups = {pid for pid, process in seen.items() if process.group == pid}
    living = [
        pid
        for pid, process in _table().items()
        if process.state not in "ZX" and (process.group in groups or (pid in seen and seen[pid].start == process.start))
    ]
    for pid in living:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return bool(living)


if __name__ == "__main__":
    main()
