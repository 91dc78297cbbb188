"""SIGTERM, as schedulers send it before they take a machine away: save first, then end."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class Preempted(BaseException):
    """SIGTERM has come and it is time to go. Not an `Exception`: nothing on the way may take it for a failure."""


class Preemption:
    """Whether SIGTERM has come.

    Args:
        grace_s: seconds from the signal in which the step may end; then `Preempted` is raised wherever the run is.

    Attributes:
        asked: whether it has.
        state: says what the run goes on from, for the message.
    """

    def __init__(self, grace_s: float):
        self._grace_s = grace_s
        self.asked = False
        self.state: Callable[[], str] = lambda: "nothing was computed yet"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Catches the signal inside, where this is the main thread (elsewhere Python has no signals)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = [
            (number, signal.signal(number, handler) or signal.SIG_DFL)  # None: not set by Python
            for number, handler in ((signal.SIGTERM, self._on_term), (signal.SIGALRM, self._on_alarm))
        ]
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before:
                signal.signal(number, handler)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked = True
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"SIGTERM: the step in hand has {self._grace_s:g} s to end and be saved\n".encode())
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise Preempted(
            f"stopped by SIGTERM; the step did not end within trainer.preempt_grace_s={self._grace_s:g}; {self.state()}"
        )
