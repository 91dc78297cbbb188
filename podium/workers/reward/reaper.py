"""Kills the scoring processes of a driver that is gone without having ended them (SIGKILL).

Reads from standard input, a pipe from the driver: ``+pid start_ticks`` for a process that has begun, ``-pid`` for one
that the driver has ended. When the pipe ends, so has the driver. Imports nothing heavy.
"""

import sys

from podium.utils.process_tree import kill_tree, start_ticks


def main() -> None:
    """Watches until the pipe ends."""
    alive: dict[int, int] = {}
    for line in sys.stdin:
        if line.startswith("-"):
            alive.pop(int(line[1:]), None)
        else:
            pid, ticks = map(int, line[1:].split())
            alive[pid] = ticks
    for pid, ticks in alive.items():
        if start_ticks(pid) in (ticks, None):  # a group outlives its leader; another process under the number does not
            kill_tree(pid)


if __name__ == "__main__":
    main()
