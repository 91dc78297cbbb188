"""The reward model's part of the score."""

from collections.abc import Callable

import torch

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.config.reward import RewardModelConfig

_INPUTS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]

Scores = Callable[[DataProto], tuple[torch.Tensor, dict[str, float]]]
"""A batch's scores, (B,) float32 with NaN where there is none; and metrics."""


class TokenScores:
    """Has a `RewardModelWorker` group read the policy's own tokens."""

    def __init__(self, group: WorkerGroup):
        self._group = group

    def __call__(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
        """Scores (B,) float32; a response without a token has 0."""
        scores: torch.Tensor = self._group.compute_rm_score(batch.select(_INPUTS, [], [])).batch["rm_scores"]
        return scores.sum(dim=-1), {}


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


def normalized(scores: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`scores` (B,) at mean 0 and variance 1 over the valid rows; 0 elsewhere, and where all are alike."""
    kept = scores[valid].double()
    if len(kept) == 0:
        return torch.zeros_like(scores)
    centred = (scores.double() - kept.mean()) / (kept.std(correction=0) + 1e-8)
    return torch.where(valid, centred, 0.0).to(scores.dtype)
