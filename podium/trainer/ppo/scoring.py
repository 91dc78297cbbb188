"""The score of a response as training sees it: reward function and reward model, less the penalty for length."""

from typing import Any

import torch

from podium.protocol import DataProto
from podium.trainer.ppo.model_reward import ModelReward
from podium.trainer.ppo.rewards import overlong_penalty
from podium.utils.torch_functional import place_on_last_token
from podium.workers.reward.manager import RewardManager


class Scoring:
    """Scores batches.

    Args:
        reward: the reward function's scores; None where the model alone scores.
        overlong_buffer: has ``enable``, ``len``, ``penalty_factor``.
        max_response_length: tokens.
        model: the reward model's scores, to be added.
        function_weight: of the reward function beside the model.
    """

    def __init__(
        self,
        reward: RewardManager | None,
        overlong_buffer: Any,
        max_response_length: int,
        model: ModelReward | None = None,
        function_weight: float = 1.0,
    ):
        assert reward is not None or model is not None, "nothing scores"
        self._reward, self._buffer, self._max_response_length = reward, overlong_buffer, max_response_length
        self._model, self._function_weight = model, function_weight

    def __call__(self, batch: DataProto) -> DataProto:
        """Adds to `batch` what the reward function gives, and ``sequence_scores`` (B,): scores before the penalty."""
        assert batch.batch is not None
        mask = batch.batch["response_mask"]
        scored = self._reward(batch) if self._reward is not None else _nothing(mask)
        if self._model is not None:
            self._add_model(scored, batch, self._model)
        assert scored.batch is not None
        scores = scored.batch["token_level_scores"]
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

    def _add_model(self, scored: DataProto, batch: DataProto, model: ModelReward) -> None:
        assert scored.batch is not None and batch.batch is not None
        reward, metrics = model.reward(batch)
        function_part = self._function_weight * scored.batch["token_level_scores"]
        scored.batch["token_level_scores"] = function_part + place_on_last_token(reward, batch.batch["response_mask"])
        scored.meta_info["metrics"] |= metrics


def _nothing(mask: torch.Tensor) -> DataProto:
    """What a reward function gives, where there is none."""
    return DataProto.from_dict({"token_level_scores": torch.zeros(mask.shape)}, meta_info={"metrics": {}})
