"""Failures of remote work, each naming the role, rank and method it happened in."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any


class WorkerError(RuntimeError):
    """A worker's method or constructor raised.

    Attributes:
        role: the role's name (``"actor"``).
        rank: the rank that raised, or None where no single rank is to blame.
        method: the method called; ``"__init__"`` for a constructor.
        remote_traceback: the traceback as the worker printed it, or "".
        out_of_memory: None, or, where the worker ran out of memory, for what (empty where that is not known).
    """

    out_of_memory: str | None = None

    def __init__(
        self, message: str, *, role: str = "", rank: int | None = None, method: str = "", remote_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.role, self.rank, self.method, self.remote_traceback = role, rank, method, remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], dict(self.__dict__))


class WorkerDied(WorkerError):
    """A worker process ended while it was still needed.

    Attributes:
        exit_code: its exit code (negative: the signal that killed it), or None where it could not be learned.
        last_log_lines: the last lines it printed.
    """

    exit_code: int | None = None
    last_log_lines: Sequence[str] = ()


class WorkerTimeout(WorkerError, TimeoutError):
    """Ranks did not answer within the group's ``timeout_s``.

    Attributes:
        waiting_on: the ranks that have not answered.
        phase: what they do, where the call's deadline has a name for it.
    """

    waiting_on: Sequence[int] = ()
    phase: str = ""


def _rebuild(cls: type[WorkerError], message: str, state: dict[str, Any]) -> WorkerError:
    error = cls(message)
    error.__dict__.update(state)
    return error


def died(
    role: str, rank: int, method: str, exit_code: int | None, lines: Sequence[str], detail: str = ""
) -> WorkerDied:
    """The report of a dead process, in one exception."""
    if exit_code is None:
        how = "died; its exit code could not be learned"
    elif exit_code < 0:
        how = f"was killed by {_signal_name(-exit_code)} (exit code {exit_code})"
        detail = f"{detail} {_OUT_OF_MEMORY}".strip() if exit_code == -signal.SIGKILL else detail
    else:
        how = f"exited with code {exit_code}"
    log = "\n".join(f"  | {line}" for line in lines) or "  (it had printed nothing)"
    during = f" while {role}.{method} was running or queued" if method else ""
    message = f"worker {role!r} rank {rank} {how}{during}.{' ' + detail if detail else ''}\nLast log lines:\n{log}"
    error = WorkerDied(message, role=role, rank=rank, method=method)
    error.exit_code, error.last_log_lines = exit_code, list(lines)
    return error


def timed_out(method: str, waiting_on: Sequence[tuple[str, int]], timeout_s: float) -> WorkerTimeout:
    """The report of ranks that have not answered, in one exception.

    Args:
        waiting_on: role and rank of each.
    """
    ranks: dict[str, list[int]] = {}
    for role, rank in waiting_on:
        ranks.setdefault(role, []).append(rank)
    first = waiting_on[0][0]
    who = " and ".join(
        f"{f'{role} ' if len(ranks) > 1 else ''}rank(s) {', '.join(map(str, numbers))}"
        for role, numbers in ranks.items()
    )
    error = WorkerTimeout(
        f"{first}.{method} did not finish within {timeout_s:g} s; no answer yet from {who}",
        role=first if len(ranks) == 1 else "",
        rank=waiting_on[0][1] if len(waiting_on) == 1 else None,
        method=method,
    )
    error.waiting_on = [rank for _, rank in waiting_on]
    return error


_OUT_OF_MEMORY = (
    "The kernel does that to the process with the most when the machine, or its container, is out of memory: see dmesg."
)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
