"""Supervised fine-tuning: what an update is, and what validation says."""

import math
from typing import Any

from podium.protocol import DataProto
from podium.trainer.sft.loop import SupervisedTrainer, batch_of
from podium.utils.torch_functional import masked_sum

_VALIDATION_ROWS = 256


class SFTTrainer(SupervisedTrainer):
    """Fits a causal language model to responses; the group is an `ActorWorker` with `sft_objective`."""

    def update(self, batch: DataProto) -> list[dict[str, float]]:
        """One optimizer step; its metrics."""
        return self.group.update_actor(batch)[0]

    def validate(self, dataset: Any) -> dict[str, float]:
        """Loss over a data set, and the mean probability of a whole response.

        The latter is the share of *sampled* responses that would equal the reference, token for token: what an RL run
        that starts here begins with.
        """
        loss, tokens, probability = 0.0, 0, 0.0
        for start in range(0, len(dataset), _VALIDATION_ROWS):
            batch = batch_of(dataset, range(start, min(start + _VALIDATION_ROWS, len(dataset))))
            assert batch.batch is not None
            mask = batch.batch["response_mask"]
            log_probs = self.group.compute_log_prob(batch).batch["old_log_probs"]
            per_row = masked_sum(log_probs, mask, dim=-1)
            loss -= float(per_row.sum())
            tokens += int(mask.sum())
            probability += float(per_row.exp().sum())
        mean = loss / tokens
        return {
            "val/loss": mean,
            "val/perplexity": math.exp(min(mean, 700.0)),
            "val/response_prob": probability / len(dataset),
        }
