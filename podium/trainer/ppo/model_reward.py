"""The reward model's part of the score."""

import torch

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.config.reward import RewardModelConfig

_INPUTS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


class ModelReward:
    """Scores batches by a `RewardModelWorker` group."""

    def __init__(self, group: WorkerGroup, config: RewardModelConfig):
        self._group, self._config = group, config

    def __call__(self, batch: DataProto) -> torch.Tensor:
        """The model's scores as it gives them, (B,) float32; a response without a token has 0."""
        scores: torch.Tensor = self._group.compute_rm_score(batch.select(_INPUTS, [], [])).batch["rm_scores"]
        return scores.sum(dim=-1)

    def reward(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
        """What the model adds to the reward, (B,) float32: normalised and weighted; and metrics."""
        assert batch.batch is not None
        scores = self(batch)
        answered = batch.batch["response_mask"].bool().any(dim=-1)
        kept = scores[answered]
        metrics = {}
        if len(kept):
            metrics = {
                "reward_model/score/mean": float(kept.mean()),
                "reward_model/score/std": float(kept.std(correction=0)),
                "reward_model/score/min": float(kept.min()),
                "reward_model/score/max": float(kept.max()),
            }
        if self._config.normalize == "batch":
            scores = normalized(scores, answered)
        reward = self._config.weight * scores
        metrics["reward_model/reward/mean"] = float(reward.mean())
        return reward, metrics


def normalized(scores: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`scores` (B,) at mean 0 and variance 1 over the valid rows; 0 elsewhere, and where all are alike."""
    kept = scores[valid].double()
    if len(kept) == 0:
        return torch.zeros_like(scores)
    centred = (scores.double() - kept.mean()) / (kept.std(correction=0) + 1e-8)
    return torch.where(valid, centred, 0.0).to(scores.dtype)
