"""Validation: the held-out prompts, answered with their own sampling parameters, scored and tabulated."""

import math
import numbers
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from podium.protocol import DataProto
from podium.trainer.config.ppo import PPOConfig
from podium.trainer.ppo.model_reward import ModelReward
from podium.trainer.ppo.rollout_client import RolloutClient
from podium.trainer.ppo.scoring import scored_rows
from podium.trainer.ppo.source import generate, prompt_batch, response_seeds
from podium.utils.dataset import PromptDataset
from podium.utils.dataset_text import chat_as_text
from podium.utils.torch_functional import place_on_last_token
from podium.workers.reward.manager import RewardManager

# A stream of sampling seeds that no training batch uses.
_VALIDATION_STREAM = 2**31


class Validator:
    """Scores the policy on the whole validation set.

    Args:
        reward: gives the score; None where the reward `model` does.
        model: its score is reported beside the reward function's.
    """

    def __init__(
        self,
        config: PPOConfig,
        dataset: PromptDataset,
        rollout: RolloutClient,
        reward: RewardManager | None,
        tokenizer: Any,
        model: ModelReward | None = None,
    ):
        self._config, self._dataset = config, dataset
        self._rollout, self._reward, self._tokenizer, self._model = rollout, reward, tokenizer, model

    def __call__(self, min_version: int) -> tuple[dict[str, float], list[list[Any]]]:
        """Metrics ``val/...`` and rows (prompt, response, ground truth, score) for the sample table."""
        size = self._config.data.val_batch_size or len(self._dataset)
        extra: dict[str, list[float]] = defaultdict(list)
        parts = [self._run(start, size, min_version, extra) for start in range(0, len(self._dataset), size)]
        batch = DataProto.concat(parts)
        assert batch.batch is not None
        scores = torch.where(scored_rows(batch), batch.batch["token_level_scores"].sum(dim=-1), torch.nan).tolist()
        lengths = batch.batch["response_mask"].sum(dim=-1).float()
        metrics = {
            "val/response_length/mean": float(lengths.mean()),
            "val/failure_rate": sum(map(math.isnan, scores)) / len(scores),
            **self._score_metrics(batch, scores),
        }
        metrics.update((f"val/{name}/mean", sum(values) / len(values)) for name, values in extra.items())
        return metrics, self._samples(batch, scores)

    def _run(self, start: int, size: int, min_version: int, extra: dict[str, list[float]]) -> DataProto:
        """Answers and scores some rows; the numbers that the reward function returns beside the score go to `extra`."""
        rows = [self._dataset[i] for i in range(start, min(start + size, len(self._dataset)))]
        data, kwargs = self._config.data, self._config.actor_rollout_ref.rollout.val_kwargs
        prompts = prompt_batch(rows, self._tokenizer.pad_token_id, data.max_prompt_length, kwargs.n)
        prompts.non_tensor_batch["uid"] = np.array(
            [f"{start}-{uid}" for uid in prompts.non_tensor_batch["uid"]], dtype=object
        )
        sampling = {"temperature": kwargs.temperature, "top_p": kwargs.top_p, "top_k": kwargs.top_k}
        seeds = response_seeds(self._config.trainer.seed, _VALIDATION_STREAM + start, len(prompts))
        batch = generate(self._rollout, prompts, sampling, seeds, min_version)
        scored = self._score(batch, extra)
        for name, column in scored.non_tensor_batch.items():
            numeric = [float(value) for value in column if isinstance(value, numbers.Real)]
            if numeric:
                extra[name] += numeric
        return batch.select(
            batch_keys=["responses", "response_mask"],
            non_tensor_batch_keys=["uid", "data_source", "raw_prompt", "reward_model"],
        ).union(scored.select(["token_level_scores", "scored"], non_tensor_batch_keys=[], meta_info_keys=[]))

    def _score(self, batch: DataProto, extra: dict[str, list[float]]) -> DataProto:
        scored = self._reward(batch) if self._reward is not None else None
        if self._model is not None:
            assert batch.batch is not None
            scores = self._model(batch)
            has_score = ~scores.isnan()
            extra["reward_model/score"] += scores[has_score].tolist()
            if scored is None:
                placed = place_on_last_token(scores.nan_to_num(0.0), batch.batch["response_mask"])
                scored = DataProto.from_dict({"token_level_scores": placed, "scored": has_score})
        assert scored is not None, "nothing scores"
        return scored

    def _score_metrics(self, batch: DataProto, scores: list[float]) -> dict[str, float]:
        """Mean score over all rows and by data source; with several responses a prompt, also the best of each.

        A response without a score (NaN) counts in none of them.
        """
        n = self._config.actor_rollout_ref.rollout.val_kwargs.n
        by_source: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for source, uid, score in zip(
            batch.non_tensor_batch["data_source"], batch.non_tensor_batch["uid"], scores, strict=True
        ):
            if not math.isnan(score):
                by_source[str(source)][str(uid)].append(score)
        scores = [score for score in scores if not math.isnan(score)]
        metrics = {"val/score/mean": sum(scores) / len(scores)}
        for source, groups in by_source.items():
            flat = [score for group in groups.values() for score in group]
            metrics[f"val/{source}/score/mean@{n}"] = sum(flat) / len(flat)
            if n > 1:
                metrics[f"val/{source}/score/best@{n}"] = sum(max(g) for g in groups.values()) / len(groups)
        return metrics

    def _samples(self, batch: DataProto, scores: list[float]) -> list[list[Any]]:
        assert batch.batch is not None
        count = min(self._config.trainer.log_val_generations, len(batch))
        masks = batch.batch["response_mask"].bool()
        return [
            [
                chat_as_text(batch.non_tensor_batch["raw_prompt"][row]),
                self._tokenizer.decode(batch.batch["responses"][row][masks[row]]),
                (batch.non_tensor_batch["reward_model"][row] or {}).get("ground_truth"),
                # A float32 has no more digits.
                "none" if math.isnan(scores[row]) else float(f"{scores[row]:.7g}"),
            ]
            for row in range(count)
        ]
