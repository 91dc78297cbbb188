"""The reward model's part of the score."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.config.reward import RewardModelConfig
from podium.workers.reward.failures import FailureLog
from podium.workers.reward.manager import score_requests
from podium.workers.reward.outcome import Outcome, ScoreRequest

_INPUTS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]

Scores = Callable[[DataProto], tuple[torch.Tensor, dict[str, float]]]
"""A batch's scores, (B,) float32 with NaN where there is none; and metrics."""


class Noting:
    """Takes note of the responses that a model gives no score.

    Args:
        name: what scores, for messages.
        tokenizer: the policy's.
        max_failure_rate: share of a batch that may be without a score.
        run_dir: where samples without a score are kept.
    """

    def __init__(self, name: str, tokenizer: Any, max_failure_rate: float, run_dir: Path):
        self._tokenizer, self._log = tokenizer, FailureLog(name, max_failure_rate, prefix="reward_model")
        self._log.keep_in(run_dir)

    def __call__(
        self, batch: DataProto, outcomes: Sequence[Outcome], requests: Sequence[ScoreRequest] = ()
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Scores (B,) float32, NaN where there is none; and the shares of failures.

        Args:
            requests: the responses as text, where they have been decoded already.

        Raises:
            RewardError: too many responses without a score.
        """
        if not requests and any(outcome.score is None for outcome in outcomes):
            requests = score_requests(batch, self._tokenizer)
        indices = batch.non_tensor_batch.get("index", range(len(outcomes)))
        metrics = self._log(requests, outcomes, list(indices))
        scores = [torch.nan if outcome.score is None else outcome.score for outcome in outcomes]
        return torch.tensor(scores, dtype=torch.float32), metrics


class TokenScores:
    """Has a `RewardModelWorker` group read the policy's own tokens."""

    def __init__(self, group: WorkerGroup, noting: Noting):
        self._group, self._noting = group, noting

    def __call__(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
        """Scores (B,) float32, NaN where there is none, and the shares of failures; a response without a token has 0.

        Raises:
            RewardError: too many responses without a score.
        """
        scores = self._group.compute_rm_score(batch.select(_INPUTS, [], [])).batch["rm_scores"]
        return self._noting(batch, outcomes_of(scores))


class ModelReward:
    """What a model makes of a batch, as it is and as it is trained on."""

    def __init__(self, scores: Scores, config: RewardModelConfig):
        self._scores, self._config = scores, config

    def __call__(self, batch: DataProto) -> torch.Tensor:
        """The model's scores as it gives them, (B,) float32; NaN where there is none."""
        return self._scores(batch)[0]

    def reward(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
        """What the model adds to the reward, (B,) float32, normalised and weighted, NaN where it has no score; metrics.

        A response without a token has no reward.
        """
        assert batch.batch is not None
        scores, metrics = self._scores(batch)
        failed = scores.isnan()
        kept = batch.batch["response_mask"].bool().any(dim=-1) & ~failed
        if kept.any():
            values = scores[kept]
            metrics |= {
                "reward_model/score/mean": float(values.mean()),
                "reward_model/score/std": float(values.std(correction=0)),
                "reward_model/score/min": float(values.min()),
                "reward_model/score/max": float(values.max()),
            }
        if self._config.normalize == "batch":
            scores = normalized(scores, kept)
        reward = torch.where(failed, torch.nan, self._config.weight * scores)
        metrics["reward_model/reward/mean"] = float(reward[~failed].mean())
        return reward, metrics


def outcomes_of(rm_scores: torch.Tensor) -> list[Outcome]:
    """A reward model's outcome for each response, of its scores (B, T) by token."""
    return [
        Outcome("score", score=score)
        if math.isfinite(score)
        else Outcome("error", reason=f"the reward model gives {score}; expected a finite number")
        for score in rm_scores.sum(dim=-1).tolist()
    ]


def normalized(scores: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`scores` (B,) at mean 0 and variance 1 over the valid rows; 0 elsewhere, and where all are alike."""
    kept = scores[valid].double()
    if len(kept) == 0:
        return torch.zeros_like(scores)
    centred = (scores.double() - kept.mean()) / (kept.std(correction=0) + 1e-8)
    return torch.where(valid, centred, 0.0).to(scores.dtype)
