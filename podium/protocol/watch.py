"""The deadline of a call that runs in the thread of its caller."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

from podium.protocol.deadline import Deadline
from podium.protocol.errors import timed_out

GRACE_S = 30.0
"""From the interrupt to the end of the process, where the call does not come back."""
_SIGNAL = signal.SIGUSR2
_DAY_S = 86400.0  # what a lock can wait for has a limit


class _Late(BaseException):
    """Not an `Exception`: nothing in the call may take it for a failure of its own."""


@contextmanager
def watching(role: str, method: str, deadline: Deadline) -> Iterator[None]:
    """Interrupts what runs inside once its time is over, as Ctrl-C would.

    A call into C that does not return is not interrupted; `GRACE_S` later the process is ended, with the stacks of all
    threads on stderr. Who is debugging has all the time there is, as have threads other than the main one, which Python
    cannot interrupt.

    Raises:
        WorkerTimeout: with a note that says where the call was.
    """
    if deadline.seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(_SIGNAL, _raise_late)
    watcher, call = _Watcher.running(), _Call(role, method, deadline, deadline.seconds)
    watcher.begin(call)
    try:
        try:
            yield
        finally:
            watcher.end(call)
    except _Late as late:
        error = timed_out(method, [(role, 0)], deadline.seconds)
        error.add_note("it was at:\n" + "".join(traceback.format_tb(late.__traceback__)[1:-1]))
        raise error from None
    finally:
        signal.signal(_SIGNAL, before)


def _raise_late(number: int, frame: FrameType | None) -> None:
    raise _Late


class _Call:
    def __init__(self, role: str, method: str, deadline: Deadline, seconds: float) -> None:
        self.role, self.method, self.deadline, self.seconds = role, method, deadline, seconds
        self.until, self.is_late = time.monotonic() + seconds, False


class _Watcher(threading.Thread):
    """Looks at the clock, for one call after the other: a thread a call would cost more than most calls."""

    _instance: ClassVar[_Watcher | None] = None

    @classmethod
    def running(cls) -> _Watcher:
        """The process's own; a forked process has none at first."""
        if cls._instance is None or not cls._instance.is_alive():
            cls._instance = cls()
            cls._instance.start()
        return cls._instance

    def __init__(self) -> None:
        super().__init__(name="deadline", daemon=True)
        self._changed = threading.Condition()
        self._call: _Call | None = None
        self._wakes = math.inf
        """When the thread looks next by itself; it need not be woken for a deadline that is later."""

    def begin(self, call: _Call) -> None:
        with self._changed:
            self._call = call
            if call.until < self._wakes:
                self._changed.notify()

    def end(self, call: _Call) -> None:
        with self._changed:
            self._call = None
            if call.is_late:
                self._changed.notify()
        if call.is_late:
            time.sleep(0.01)  # the signal, if it is not here yet, comes here and not later

    def run(self) -> None:
        with self._changed:
            while True:
                call = self._call
                self._wakes = call.until if call is not None else math.inf
                self._changed.wait(None if call is None else max(0.0, min(call.until - time.monotonic(), _DAY_S)))
                call = self._call
                if call is not None and time.monotonic() >= call.until:
                    self._interrupt(call)

    def _interrupt(self, call: _Call) -> None:
        main = threading.main_thread().ident
        assert main is not None
        if _is_debugging(main):
            call.until = math.inf
            return
        call.is_late = True
        signal.pthread_kill(main, _SIGNAL)
        if not self._changed.wait_for(lambda: self._call is not call, GRACE_S):
            told = call.deadline.explain(timed_out(call.method, [(call.role, 0)], call.seconds))
            text = f"{told}\nnor could it be interrupted in {GRACE_S:g} s more: the process ends here, at\n"
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
