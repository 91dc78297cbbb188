"""Scoring of a batch's first responses while its last are still being generated."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from podium.protocol.data import DataProto
from podium.workers.reward.manager import RewardManager
from podium.workers.reward.outcome import Outcome


class Overlap:
    """Hands parts of one batch to the scorer from a thread of its own, one after the other.

    As a context: left by an exception, it gives up what is not scored yet.
    """

    def __init__(self, reward: RewardManager):
        self._reward = reward
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")
        self._parts: list[tuple[list[int], Future[list[Outcome]]]] = []

    def put(self, rows: Iterable[int], part: DataProto) -> None:
        """Has `part`, which is these rows of the batch, scored."""
        self._parts.append((list(rows), self._thread.submit(self._reward.outcomes, part)))

    def outcomes(self) -> list[Outcome]:
        """Of all rows that were put, in the order of their numbers; waits for them.

        Raises:
            UserError: the reward function cannot be loaded.
        """
        by_row: dict[int, Outcome] = {}
        for rows, scored in self._parts:
            by_row.update(zip(rows, scored.result(), strict=True))
        return [by_row[row] for row in sorted(by_row)]

    def __enter__(self) -> "Overlap":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if kind is not None:
            self._reward.cancel()
        self._thread.shutdown(wait=True)
