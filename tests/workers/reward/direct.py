"""A scorer for functions that exist in a test only: it calls them where it is."""

from podium.workers.reward.call import call_row
from podium.workers.reward.outcome import Outcome, ScoreRequest


class DirectScorer:
    takes_parts = True

    def __init__(self, fn):
        self._fn = fn

    def __call__(self, requests: list[ScoreRequest]) -> list[Outcome]:
        return [call_row(self._fn, request) for request in requests]

    def describe(self) -> str:
        return repr(self._fn)

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass
