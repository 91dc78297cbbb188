"""Ending a process with everything that it started. Linux, standard library only."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_ROUNDS = 200


class _Process(NamedTuple):
    parent: int
    group: int
    state: str


def become_subreaper() -> None:
    """Makes this process the parent of those below it that lose theirs, so that a daemon stays in its tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """A subreaper within the context, and after it what the process was before."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    become_subreaper()
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, argument: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; with the id it names a process for good. None if it is gone."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def kill_tree(root: int) -> None:
    """Kills the leader of a session, its process group, and all processes below it; the caller reaps it.

    A root that called `become_subreaper` loses none of them, whatever they do.
    """
    with contextlib.suppress(OSError):
        os.killpg(root, signal.SIGSTOP)  # what is stopped starts nothing more, and still adopts orphans
    kill_below(root)
    with contextlib.suppress(OSError):
        os.killpg(root, signal.SIGKILL)


def kill_below(root: int) -> None:
    """Kills the process group and all processes below `root`, but not `root`."""
    for _ in range(_ROUNDS):
        below = _below(root)
        if not below:
            break
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _below(root: int) -> list[int]:
    """The living descendants and group members of `root`, without it."""
    table = _table()
    found = {pid for pid, process in table.items() if process.group == root} | {root}
    while more := {pid for pid, process in table.items() if process.parent in found} - found:
        found |= more
    return [pid for pid in found - {root} if pid in table and table[pid].state not in "ZX"]


def _table() -> dict[int, _Process]:
    out = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = _stat(int(name))
        if fields is not None:
            out[int(name)] = _Process(int(fields[1]), int(fields[2]), fields[0])
    return out


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/pid/stat after the name: state, parent, group, ..."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
