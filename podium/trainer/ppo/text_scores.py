"""Scores of models that read a response as text: a reward model with a tokenizer of its own, or a judge."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.config.reward import RewardModelConfig
from podium.trainer.ppo.model_reward import ModelReward, Noting, TokenScores, outcomes_of
from podium.trainer.ppo.reward_reader import Encode, Reader, read_verdict
from podium.trainer.ppo.source import generate
from podium.utils.dataset_text import pad_rows
from podium.utils.errors import UserError
from podium.workers.reward.judge import Verdict
from podium.workers.reward.manager import score_requests
from podium.workers.reward.outcome import Outcome

Answer = Callable[[list[list[int]]], list[Outcome]]
"""The model's outcome for each."""


def build_model_reward(
    config: RewardModelConfig,
    group: WorkerGroup,
    reader: Reader | None,
    tokenizer: Any,
    run_dir: Path,
    seed: int,
) -> ModelReward:
    """The reward of the model in `group`, which reads tokens, reads text, or answers questions.

    Args:
        reader: how the model reads text; None where it reads the policy's tokens.
        tokenizer: the policy's.
        run_dir: where samples without a score are kept.
        seed: of the run.
    """
    name = "judge" if config.style == "generative" else "reward model"
    noting = Noting(f"{name} {config.model.path}", tokenizer, config.max_failure_rate, run_dir)
    if reader is None:
        return ModelReward(TokenScores(group, noting), config)
    answer: Answer
    if config.style == "generative":
        answer = AskedJudge(group, config, read_verdict(config.judge), reader.tokenizer, seed)
    else:
        answer = ReadByModel(group, reader.tokenizer.pad_token_id)
    return ModelReward(TextScores(reader.encode, answer, tokenizer, noting), config)


class TextScores:
    """Puts each response into the model's words.

    Args:
        tokenizer: the policy's.
    """

    def __init__(self, encode: Encode, answer: Answer, tokenizer: Any, noting: Noting):
        self._encode, self._answer, self._tokenizer, self._noting = encode, answer, tokenizer, noting

    def __call__(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
        """Scores (B,) float32, NaN where there is none; and the shares of failures.

        Raises:
            RewardError: too many responses without a score.
        """
        requests = score_requests(batch, self._tokenizer)
        outcomes: dict[int, Outcome] = {}
        readable: dict[int, list[int]] = {}
        for row, request in enumerate(requests):
            try:
                readable[row] = self._encode(request)
            except UserError as error:
                outcomes[row] = Outcome("error", reason=str(error))
        if readable:
            outcomes.update(zip(readable, self._answer(list(readable.values())), strict=True))
        return self._noting(batch, [outcomes[row] for row in range(len(requests))], requests)


class ReadByModel:
    """Asks a `RewardModelWorker` group for the scores of whole texts."""

    def __init__(self, group: WorkerGroup, pad_token_id: int):
        self._group, self._pad = group, pad_token_id

    def __call__(self, rows: list[list[int]]) -> list[Outcome]:
        ids, filled = pad_rows(rows, self._pad, max(2, *map(len, rows)), left=False)
        # The workers score a response on its last token: here that is everything after the first token.
        scores = self._group.compute_rm_score(
            DataProto.from_dict(
                {
                    "input_ids": ids,
                    "attention_mask": filled,
                    "position_ids": (filled.long().cumsum(dim=1) - 1).clamp(min=0),
                    "responses": ids[:, 1:],
                    "response_mask": filled[:, 1:],
                }
            )
        ).batch["rm_scores"]
        return outcomes_of(scores)


class AskedJudge:
    """Has a `JudgeWorker` group answer, and reads the verdicts.

    Args:
        tokenizer: the judge's.
        seed: of the run. A verdict depends on it and on what is asked, not on what else is in the batch.
    """

    def __init__(self, group: WorkerGroup, config: RewardModelConfig, verdict: Verdict, tokenizer: Any, seed: int):
        self._group, self._verdict, self._tokenizer, self._seed = group, verdict, tokenizer, seed
        rollout = config.rollout
        self._width = config.judge.max_prompt_length
        self._sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}

    def __call__(self, rows: list[list[int]]) -> list[Outcome]:
        prompts, filled = pad_rows(rows, self._tokenizer.pad_token_id, max(map(len, rows)), left=True)
        questions = DataProto.from_dict({"prompts": prompts, "prompt_mask": filled})
        answers = generate(self._group, questions, self._sampling, self._seeds(rows), min_version=0)
        assert answers.batch is not None
        masks = answers.batch["response_mask"].bool()
        ids = [row[mask].tolist() for row, mask in zip(answers.batch["responses"], masks, strict=True)]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        ends = answers.meta_info["eos_token_id"]
        return [self._verdict(text, tokens[-1] in ends) for text, tokens in zip(texts, ids, strict=True)]

    def _seeds(self, rows: list[list[int]]) -> torch.Tensor:
        digests = [hashlib.sha256(np.array([self._seed, *row]).tobytes()).digest()[:8] for row in rows]
        return torch.tensor([int.from_bytes(digest, "little") >> 2 for digest in digests])
