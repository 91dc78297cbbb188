"""Requests that are answered a few steps at a time, so that who waits for the first need not wait for the last."""

from podium.workers.rollout.base import Output, Request, RolloutEngine


class OpenBatch:
    """Requests of one batch in an engine.

    Raises:
        StaleWeightsError: the engine's weights are older than `min_version`.
    """

    def __init__(self, engine: RolloutEngine, requests: list[Request], min_version: int):
        engine.require_version(min_version)
        self._engine = engine
        self._rows = {request.request_id: row for row, request in enumerate(requests)}
        try:
            for request in requests:
                engine.submit(request)
        except BaseException:
            self.abort()
            raise

    @property
    def unfinished(self) -> int:
        """Requests that are not answered yet."""
        return len(self._rows)

    def advance(self, steps: int) -> dict[int, Output]:
        """Takes at most so many steps; what has finished then, by its place in the batch."""
        finished: dict[int, Output] = {}
        try:
            for _ in range(steps):
                if not self._rows:
                    break
                finished.update((self._rows.pop(output.request_id), output) for output in self._engine.step())
        except BaseException:
            self.abort()
            raise
        return finished

    def abort(self) -> None:
        """Gives up what is left, which would block the next weight update."""
        self._engine.abort(list(self._rows))
        self._rows = {}
