"""Reward-model training: what an update is, and what validation says."""

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from podium.protocol import DataProto
from podium.trainer.sft.loop import SupervisedTrainer, batch_of

_VALIDATION_PAIRS = 128


class RMTrainer(SupervisedTrainer):
    """Fits scores to preferences; the group is a `RewardModelTrainer` with `preference_objective`."""

    def update(self, batch: DataProto) -> list[dict[str, float]]:
        """One optimizer step; its metrics."""
        return self.group.update_reward_model(batch)[0]

    def validate(self, dataset: Any) -> dict[str, float]:
        """Share of pairs in which the chosen response scores higher, loss, and where the scores lie."""
        parts = []
        for start in range(0, len(dataset), _VALIDATION_PAIRS):
            batch = batch_of(dataset, range(start, min(start + _VALIDATION_PAIRS, len(dataset))))
            scores = self.group.compute_rm_score(batch).batch["rm_scores"].sum(dim=-1)
            assert batch.batch is not None
            parts.append(torch.stack([scores, batch.batch["margins"]]))
        scores, margins = torch.cat(parts, dim=1).double()
        chosen, rejected = scores[0::2], scores[1::2]
        gap = chosen - rejected
        return {
            "val/accuracy": float((gap > 0).double().mean()),
            "val/loss": float(-logsigmoid(gap - margins[0::2]).mean()),
            "val/score_chosen": float(chosen.mean()),
            "val/score_rejected": float(rejected.mean()),
            "val/score_std": float(scores.std(correction=0)),
        }
