"""A save under way: at once, or on a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread

from podium.utils.checkpoint import Files


class Saving:
    """Runs `save`; its result, or what it raised, is there when it is asked for.

    Args:
        background: on a thread. It ends with the process: a save cut short leaves a folder that nobody takes for whole.
    """

    def __init__(self, save: Callable[[], Files], background: bool):
        self._future: Future[Files] = Future()
        if background:
            Thread(target=self._run, args=(save,), name="checkpoint", daemon=True).start()
        else:
            self._run(save)

    def _run(self, save: Callable[[], Files]) -> None:
        try:
            self._future.set_result(save())
        except BaseException as error:
            self._future.set_exception(error)

    def end(self) -> None:
        """Waits until nothing is being written any more, whatever came of it."""
        wait([self._future])

    def result(self, wait: bool) -> Files | None:
        """The files' digests; None while they are being written, unless it is to wait."""
        return self._future.result() if wait or self._future.done() else None
