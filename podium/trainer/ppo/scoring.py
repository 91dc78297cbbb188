"""The score of a response as training sees it: reward function and reward model, less the penalty for length.

A response without a score takes no part: its ``response_mask`` becomes empty, so that no loss counts it, and
``scored`` keeps it from the estimators and the metrics.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch

from podium.protocol import DataProto
from podium.trainer.ppo.estimator import Estimator
from podium.trainer.ppo.model_reward import ModelReward
from podium.trainer.ppo.rewards import overlong_penalty
from podium.utils.torch_functional import place_on_last_token
from podium.workers.reward.manager import RewardManager
from podium.workers.reward.outcome import Outcome
from podium.workers.reward.overlap import Overlap


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

    def overlap(self) -> Overlap | None:
        """What scores parts of the next batch while the rest is generated; None where that cannot be."""
        return Overlap(self._reward) if self._reward is not None and self._reward.takes_parts else None

    def __call__(self, batch: DataProto, outcomes: list[Outcome] | None = None) -> DataProto:
        """Adds to `batch` its scores, and ``sequence_scores`` (B,): scores before the penalty.

        Rows that are not ``scored`` have NaN there, and an empty ``response_mask``.

        Args:
            outcomes: the reward function's, where `overlap` has them already.
        """
        assert batch.batch is not None
        mask = batch.batch["response_mask"]
        scored = self._reward(batch, outcomes) if self._reward is not None else _nothing(mask)
        if self._model is not None:
            self._add_model(scored, batch, self._model)
        assert scored.batch is not None
        scores, has_score = scored.batch["token_level_scores"], scored_rows(scored)
        scored.batch["sequence_scores"] = torch.where(has_score, scores.sum(dim=-1), torch.nan)
        if self._buffer.enable:
            lengths = mask.sum(dim=-1)
            penalty = overlong_penalty(
                lengths, self._max_response_length, self._buffer.len, self._buffer.penalty_factor
            )
            scored.batch["token_level_scores"] = scores + place_on_last_token(penalty, mask)
            scored.meta_info["metrics"] |= {
                "reward/overlong_penalty/mean": float(penalty[has_score].mean()),
                "reward/overlong/mean": float((penalty < 0)[has_score].float().mean()),
            }
        scored.meta_info["metrics"] |= _short_groups(batch.non_tensor_batch.get("uid"), has_score)
        batch = batch.union(scored)
        return batch if has_score.all() else leave_out(batch, ~has_score)

    def _add_model(self, scored: DataProto, batch: DataProto, model: ModelReward) -> None:
        assert scored.batch is not None and batch.batch is not None
        reward, metrics = model.reward(batch)
        judged = ~reward.isnan()
        placed = place_on_last_token(reward.nan_to_num(0.0), batch.batch["response_mask"])
        scored.batch["token_level_scores"] = self._function_weight * scored.batch["token_level_scores"] + placed
        scored.meta_info["metrics"] |= metrics
        # With weight 0 the function's score is only reported, and may fail.
        scored.batch["scored"] = judged & scored_rows(scored) if self._function_weight else judged


def _nothing(mask: torch.Tensor) -> DataProto:
    """What a reward function gives, where there is none."""
    return DataProto.from_dict({"token_level_scores": torch.zeros(mask.shape)}, meta_info={"metrics": {}})


def leave_out(batch: DataProto, rows: torch.Tensor) -> DataProto:
    """A batch in which `rows`, (B,) bool, take no part in training."""
    assert batch.batch is not None
    batch = batch.select()
    assert batch.batch is not None
    batch.batch["scored"] = scored_rows(batch) & ~rows
    mask = batch.batch["response_mask"]
    batch.batch["response_mask"] = torch.where(rows.unsqueeze(-1), torch.zeros_like(mask), mask)
    return batch


def scored_rows(batch: DataProto) -> torch.Tensor:
    """(B,) bool: rows that have a score; all of them where nothing says otherwise."""
    assert batch.batch is not None
    return batch.batch.get("scored", torch.ones(len(batch), dtype=torch.bool))


def advantages_of_scored(
    estimator: Estimator, batch: DataProto, rewards: torch.Tensor, algorithm: Any
) -> dict[str, torch.Tensor]:
    """``advantages`` and ``returns``, (B, R), as if the rows without a score did not exist; 0 in those rows.

    Args:
        rewards: (B, R), per token.
        algorithm: configuration of the estimators.
    """
    scored = scored_rows(batch)
    judged = batch if scored.all() else batch.select_idxs(scored)
    assert judged.batch is not None
    advantages, returns = estimator(
        {
            **dict(judged.batch.items()),
            "token_level_rewards": rewards[scored],
            "index": judged.non_tensor_batch["uid"],
            "non_tensor_batch": judged.non_tensor_batch,
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
            "config": algorithm,
        }
    )
    columns = {"advantages": rewards.new_zeros(rewards.shape), "returns": rewards.new_zeros(rewards.shape)}
    columns["advantages"][scored] = advantages
    columns["returns"][scored] = returns
    return columns


def _short_groups(uid: np.ndarray | None, scored: torch.Tensor) -> dict[str, float]:
    """How many groups failures have left with fewer than two scores, hence without anything to learn from."""
    if uid is None or bool(scored.all()):
        return {"reward/short_groups": 0}
    sizes, left = Counter(uid.tolist()), Counter(uid[scored.numpy()].tolist())
    return {"reward/short_groups": sum(left[group] < 2 <= size for group, size in sizes.items())}
