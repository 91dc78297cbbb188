"""What becomes of responses without a score: shown once a kind, counted, kept in the run directory, and a limit."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from podium.utils.errors import UserError
from podium.workers.reward.outcome import Outcome, ScoreRequest

KINDS: tuple[Literal["timeout", "error", "abstain"], ...] = ("timeout", "error", "abstain")
FILE_NAME = "reward_failures.jsonl"
_MOST_KEPT = 10_000


class RewardError(UserError):
    """A reward function, or a model that scores, failed. `outcome` has the whole traceback of the first failure."""

    def __init__(self, message: str, outcome: Outcome | None = None):
        super().__init__(message)
        self.outcome = outcome


class FailureLog:
    """Takes note of the failures of each batch.

    Args:
        scorer: what scores, for messages.
        max_failure_rate: share of a batch that may be without a score.
        prefix: of the metrics.
    """

    def __init__(self, scorer: str, max_failure_rate: float, prefix: str = "reward"):
        self._scorer, self._max_failure_rate, self._prefix = scorer, max_failure_rate, prefix
        self._file: Path | None = None
        self._shown: set[str] = set()
        self._kept = 0

    def keep_in(self, folder: str | Path) -> None:
        """From now on failed samples go to ``reward_failures.jsonl`` in `folder`: the first 10,000 of a run."""
        self._file = Path(folder) / FILE_NAME

    def __call__(
        self, requests: Sequence[ScoreRequest], outcomes: Sequence[Outcome], indices: Sequence[Any]
    ) -> dict[str, float]:
        """Shares of the batch: ``PREFIX/failure_rate``, and one for each kind.

        Args:
            indices: row numbers in the data.

        Raises:
            RewardError: more failures than `max_failure_rate` allows, or nothing but failures; with the first of them.
        """
        failed = [row for row, outcome in enumerate(outcomes) if outcome.kind != "score"]
        for row in failed:
            self._show_first(outcomes[row], self._where(row, requests, indices))
        self._keep([self._sample(requests[row], outcomes[row], indices[row]) for row in failed])
        rate = len(failed) / len(outcomes)
        if failed and (rate > self._max_failure_rate or rate == 1):
            kept = f"; the samples are in {self._file}" if self._file is not None else ""
            raise RewardError(
                f"{self._scorer} gave no score for {len(failed)} of {len(outcomes)} responses "
                f"(reward_model.max_failure_rate={self._max_failure_rate:g}); first: "
                f"{self._where(failed[0], requests, indices)}: {outcomes[failed[0]].reason}{kept}",
                outcomes[failed[0]],
            )
        counts = Counter(outcome.kind for outcome in outcomes)
        return {
            f"{self._prefix}/failure_rate": rate,
            **{f"{self._prefix}/{kind}_rate": counts[kind] / len(outcomes) for kind in KINDS},
        }

    def _where(self, row: int, requests: Sequence[ScoreRequest], indices: Sequence[Any]) -> str:
        return f"sample {row} of the batch (data row {indices[row]}), data_source '{requests[row].data_source}'"

    def _show_first(self, outcome: Outcome, where: str) -> None:
        if outcome.kind in self._shown:
            return
        self._shown.add(outcome.kind)
        print(f"{self._scorer}: first {outcome.kind}, on {where}: {outcome.reason}")
        print(outcome.traceback, end="" if outcome.traceback.endswith("\n") else "\n", flush=True)

    def _sample(self, request: ScoreRequest, outcome: Outcome, index: Any) -> dict[str, Any]:
        return {
            "kind": outcome.kind,
            "reason": outcome.reason,
            "index": index,
            "data_source": request.data_source,
            "prompt": request.prompt,
            "solution_str": request.solution_str,
            "ground_truth": request.ground_truth,
            "extra_info": dict(request.extra_info),
            "traceback": outcome.traceback,
        }

    def _keep(self, samples: list[dict[str, Any]]) -> None:
        if self._file is None or not samples:
            return
        with self._file.open("a", encoding="utf-8") as file:
            for sample in samples[: max(0, _MOST_KEPT - self._kept)]:
                file.write(json.dumps(sample, default=str) + "\n")
        if self._kept < _MOST_KEPT <= self._kept + len(samples):
            print(f"{self._file} has {_MOST_KEPT} samples; further failures are only counted", flush=True)
        self._kept += len(samples)
