"""One run at a time in a run directory."""

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from podium.utils.errors import UserError

LOCK = "run.lock"
# A process that was just killed holds its files until its memory is freed.
_PATIENCE_S = 5.0
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)


@contextlib.contextmanager
def only_run(run_dir: Path) -> Iterator[None]:
    """Holds a run directory within the context, so that no other run writes there.

    The kernel gives the lock back however the process ends. Nothing that the process starts holds it: programs do not
    get the file, and a forked child closes it.

    Raises:
        UserError: another run has it; with its process and machine.
    """
    path = run_dir / LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"trainer.default_local_dir={run_dir}: {path} cannot be opened: {error.strerror}") from error
    _open.add(lock)
    try:
        if _locked(lock, run_dir):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        if lock in _open:  # not in a child that was forked
            _open.discard(lock)
            os.close(lock)


def _locked(lock: int, run_dir: Path) -> bool:
    """Whether the lock is held now; False where the file system has none."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                holder = os.pread(lock, 1000, 0).decode(errors="replace").strip() or "a process that gave no name"
                raise UserError(
                    f"trainer.default_local_dir={run_dir} is in use by another run ({holder}): wait for its end or "
                    "stop it, or choose another directory"
                ) from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise UserError(
                    f"trainer.default_local_dir={run_dir}: it cannot be locked: {error.strerror}"
                ) from error
            print(
                f"warning: the file system of {run_dir} has no locks ({error.strerror}): that no other run uses the "
                "directory is not checked",
                file=sys.stderr,
                flush=True,
            )
            return False


_open: set[int] = set()


def _close_all() -> None:
    # The lock belongs to the open file, which a fork shares: a child that outlives the run would keep it.
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_all)
