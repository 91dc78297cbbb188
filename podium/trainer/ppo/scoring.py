"""The score of a response as training sees it: the reward function's, less the penalty for length."""

from typing import Any

from podium.protocol import DataProto
from podium.trainer.ppo.rewards import overlong_penalty
from podium.utils.torch_functional import place_on_last_token
from podium.workers.reward.manager import RewardManager


class Scoring:
    """Scores batches.

    Args:
        reward: the reward function's scores.
        overlong_buffer: has ``enable``, ``len``, ``penalty_factor``.
        max_response_length: tokens.
    """

    def __init__(self, reward: RewardManager, overlong_buffer: Any, max_response_length: int):
        self._reward, self._buffer, self._max_response_length = reward, overlong_buffer, max_response_length

    def __call__(self, batch: DataProto) -> DataProto:
        """Adds to `batch` what the reward function gives, and ``sequence_scores`` (B,): scores before the penalty."""
        scored = self._reward(batch)
        assert scored.batch is not None and batch.batch is not None
        scores, mask = scored.batch["token_level_scores"], batch.batch["response_mask"]
        scored.batch["sequence_scores"] = scores.sum(dim=-1)
        if self._buffer.enable:
            lengths = mask.sum(dim=-1)
            penalty = overlong_penalty(
                lengths, self._max_response_length, self._buffer.len, self._buffer.penalty_factor
            )
            scored.batch["token_level_scores"] = scores + place_on_last_token(penalty, mask)
            scored.meta_info["metrics"] |= {
                "reward/overlong_penalty/mean": float(penalty.mean()),
                "reward/overlong/mean": float((penalty < 0).float().mean()),
            }
        return batch.union(scored)
