"""Scorers over a pool of processes: one call a response, or one call a batch."""

from typing import Any

from podium.workers.reward.outcome import Outcome, ScoreRequest
from podium.workers.reward.pool import ProcessPool

_FURTHER_CALLS = 32


class RowScorer:
    """Calls a reward function for each response.

    Args:
        name: what scores, for errors.
    """

    takes_parts = True

    def __init__(self, pool: ProcessPool, name: str):
        self._pool, self._name = pool, name

    def __call__(self, requests: list[ScoreRequest]) -> list[Outcome]:
        return self._pool.run(requests)

    def describe(self) -> str:
        return self._name

    def cancel(self) -> None:
        self._pool.cancel()

    def close(self) -> None:
        self._pool.close()


class BatchScorer(RowScorer):
    """Calls a reward function once with all responses.

    A call that fails is made again with each half of its responses, down to those that cause it, so that the others are
    scored. After 32 further calls what is still unscored gets the failure of its last call.
    """

    takes_parts = False

    def __call__(self, requests: list[ScoreRequest]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        calls: list[list[int]] = [list(range(len(requests)))] if requests else []
        further = _FURTHER_CALLS
        while calls:
            results: list[Any] = self._pool.run([[requests[row] for row in rows] for rows in calls])
            halves: list[list[int]] = []
            for rows, result in zip(calls, results, strict=True):
                if not isinstance(result, Outcome):
                    outcomes.update(zip(rows, result, strict=True))
                elif len(rows) == 1 or further < 2:
                    outcomes.update(dict.fromkeys(rows, result))
                else:
                    further -= 2
                    halves += [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
            calls = halves
        return [outcomes[row] for row in range(len(requests))]
