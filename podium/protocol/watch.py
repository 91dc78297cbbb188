"""The deadline of a call that runs in the thread of its caller."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from podium.protocol.errors import timed_out

GRACE_S = 30.0
"""From the interrupt to the end of the process, where the call does not come back."""
_SIGNAL = signal.SIGUSR2


class _Late(BaseException):
    """Not an `Exception`: nothing in the call may take it for a failure of its own."""


@contextmanager
def watching(role: str, method: str, seconds: float | None) -> Iterator[None]:
    """Interrupts what runs inside once its time is over, as Ctrl-C would.

    A call into C that does not return is not interrupted; `GRACE_S` later the process is ended, with the stacks of all
    threads on stderr. Who is debugging has all the time there is, as have threads other than the main one, which Python
    cannot interrupt.

    Raises:
        WorkerTimeout: with a note that says where the call was.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(_SIGNAL, _interrupt)
    watch = _Watch(role, method, seconds)
    try:
        try:
            yield
        finally:
            watch.end()
    except _Late as late:
        error = timed_out(method, [(role, 0)], seconds)
        error.add_note("it was at:\n" + "".join(traceback.format_tb(late.__traceback__)[1:-1]))
        raise error from None
    finally:
        signal.signal(_SIGNAL, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Late


class _Watch:
    """Counts the seconds, in a thread of its own."""

    def __init__(self, role: str, method: str, seconds: float) -> None:
        self._name, self._seconds = f"{role}.{method}", seconds
        self._lock, self._ended, self._is_late = threading.Lock(), threading.Event(), False
        self._timer = threading.Timer(seconds, self._on_late)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """The call is over."""
        with self._lock:
            self._ended.set()
            self._timer.cancel()
        if self._is_late:
            time.sleep(0.01)  # the signal, if it is not here yet, comes here and not later

    def _on_late(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        with self._lock:
            if self._ended.is_set() or _is_debugging(main):
                return
            self._is_late = True
            signal.pthread_kill(main, _SIGNAL)
        if not self._ended.wait(GRACE_S):
            text = (
                f"{self._name} did not finish within {self._seconds:g} s, and was not to be interrupted in {GRACE_S:g} "
                "s more: the process ends here; the stacks of its threads:\n"
            )
            sys.stdout.flush()
            os.write(2, text.encode())
            faulthandler.dump_traceback(2)
            os._exit(1)


def _is_debugging(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("pdb", "bdb"):
            return True
        frame = frame.f_back
    return False
