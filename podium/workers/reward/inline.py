"""Scoring in this process."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from typing import Any

from podium.workers.reward.functions import RewardFn
from podium.workers.reward.outcome import Outcome, ScoreRequest, outcome_of_error, outcome_of_result


class InlineScorer:
    """Calls the reward function in this process.

    A plain function is called row by row in the caller's thread (some scorers use signals, which need the main thread).
    The awaitables of an async one run together, `concurrency` at a time, on one event loop that lives as long as the
    scorer: a client that the user's module keeps between calls stays usable.
    """

    def __init__(self, fn: RewardFn, concurrency: int):
        self._fn = fn
        self._concurrency = concurrency
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, requests: list[ScoreRequest]) -> list[Outcome]:
        started = [self._start(request) for request in requests]
        waiting = {row: item for row, item in enumerate(started) if not isinstance(item, Outcome)}
        finished = dict(zip(waiting, self._wait(list(waiting.values())), strict=True))
        return [item if isinstance(item, Outcome) else finished[row] for row, item in enumerate(started)]

    def close(self) -> None:
        """Ends the event loop's thread. The scorer can be used again."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def _start(self, request: ScoreRequest) -> Outcome | Awaitable[Any]:
        try:
            result = self._fn(
                data_source=request.data_source,
                solution_str=request.solution_str,
                ground_truth=request.ground_truth,
                extra_info=request.extra_info,
            )
        except Exception as error:
            return outcome_of_error(error, __file__)
        return result if inspect.isawaitable(result) else outcome_of_result(result)

    def _wait(self, awaitables: list[Awaitable[Any]]) -> list[Outcome]:
        if not awaitables:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="reward", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(self._gather(awaitables), self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt while waiting
            future.cancel()
            raise

    async def _gather(self, awaitables: list[Awaitable[Any]]) -> list[Outcome]:
        free = asyncio.Semaphore(self._concurrency)

        async def one(awaitable: Awaitable[Any]) -> Outcome:
            async with free:
                try:
                    return outcome_of_result(await awaitable)
                except Exception as error:
                    return outcome_of_error(error, __file__)

        return await asyncio.gather(*map(one, awaitables))
