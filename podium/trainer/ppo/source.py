"""Where the trainer's batches come from: prompts, answered by the rollout and scored.

Synchronous, one-step-off and asynchronous training differ only here.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.ppo.rollout_client import RolloutClient
from podium.trainer.ppo.scoring import Scoring, leave_out, scored_rows
from podium.trainer.ppo.streaming import stream
from podium.utils.dataset import PromptDataset, collate_prompts
from podium.utils.dataset_order import Sampler
from podium.utils.timing import PhaseTimer


class RolloutSource(Protocol):
    """An endless iterator of scored batches. Whoever generates them tells the `Sampler` of each, in its `update`."""

    min_version: int
    """Oldest weights that may answer; the trainer raises it after each sync."""
    epoch: int
    """Passes over the data that are behind the last batch."""

    def __next__(self) -> DataProto: ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the data and in the stream of sampling seeds."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        ...


class SyncSource:
    """Each batch is generated when it is asked for, by weights at least as new as `min_version` then says.

    Args:
        scoring: scores the responses.
        n: responses for each prompt.
        sampling: temperature, top_p, top_k.
        seed: of the run; each response is sampled with a seed of its own made of it, the batch's number and its row.
        steps_at_once: have responses scored while others are still generated, looking so many tokens apart for those
            that have finished; None scores them when all have.
        greedy_baseline: answer each prompt greedily too, and give its score to each row as ``reward_baselines`` (B,).
    """

    def __init__(
        self,
        dataset: PromptDataset,
        loader: Sampler,
        rollout: RolloutClient,
        scoring: Scoring,
        timer: PhaseTimer,
        *,
        n: int,
        sampling: Mapping[str, Any],
        seed: int,
        pad_token_id: int,
        max_prompt_length: int,
        greedy_baseline: bool = False,
        steps_at_once: int | None = None,
    ):
        self._dataset, self._loader, self._rollout, self._timer = dataset, loader, rollout, timer
        self._scoring = scoring
        self._n, self._sampling, self._seed = n, dict(sampling), seed
        self._pad, self._max_prompt_length = pad_token_id, max_prompt_length
        self._greedy_baseline, self._steps_at_once = greedy_baseline, steps_at_once
        self._drawn = 0
        self.min_version = 0
        self.epoch = 0

    def __next__(self) -> DataProto:
        self.epoch, indices = next(self._loader)
        rows = [self._dataset[int(i)] for i in indices]
        prompts = prompt_batch(rows, self._pad, self._max_prompt_length, self._n, first_uid=self._drawn * len(rows))
        seeds = response_seeds(self._seed, self._drawn, len(prompts))
        self._drawn += 1
        batch = self._answer(prompts, self._sampling, seeds)
        if self._greedy_baseline:
            first = slice(None, None, self._n)
            greedy = self._answer(prompts[first], {"temperature": 0.0, "top_p": 1.0, "top_k": -1}, seeds[first])
            assert greedy.batch is not None
            baselines = greedy.batch["token_level_scores"].sum(dim=-1).repeat_interleave(self._n)
            known = scored_rows(greedy).repeat_interleave(self._n)
            batch = leave_out(batch.union(DataProto.from_dict({"reward_baselines": baselines})), ~known)
            batch.meta_info["metrics"]["reward/greedy_baseline/mean"] = float(baselines[known].mean())
            batch.meta_info["metrics"]["reward/greedy_baseline/failure_rate"] = float((~known).float().mean())
        self._loader.update(batch)
        return batch

    def _answer(self, prompts: DataProto, sampling: Mapping[str, Any], seeds: torch.Tensor) -> DataProto:
        overlap = self._scoring.overlap() if self._steps_at_once is not None else None
        if overlap is None or self._steps_at_once is None:
            with self._timer("gen"):
                batch = generate(self._rollout, prompts, sampling, seeds, self.min_version)
            with self._timer("reward"):
                return self._scoring(batch)
        with overlap:
            with self._timer("gen"):
                batch = stream(
                    self._rollout, prompts, sampling, seeds, self.min_version, self._steps_at_once, overlap.put
                )
            with self._timer("reward"):
                return self._scoring(batch, overlap.outcomes())

    def state_dict(self) -> dict[str, Any]:
        """The position in the data and in the stream of sampling seeds."""
        return {"loader": self._loader.state_dict(), "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._loader.load_state_dict(state["loader"])
        self._drawn = state["drawn"]


def prompt_batch(
    rows: list[dict[str, Any]], pad_token_id: int, max_prompt_length: int, n: int, first_uid: int = 0
) -> DataProto:
    """Rows of a data set, each `n` times in a row, with a ``uid`` (counting from `first_uid`) that the copies share."""
    tensors, objects = collate_prompts(rows, pad_token_id, max_prompt_length)
    objects["uid"] = np.array([str(first_uid + i) for i in range(len(rows))], dtype=object)
    batch = DataProto.from_dict(tensors, objects)
    return batch.repeat(n, interleave=True) if n > 1 else batch


def response_seeds(run_seed: int, stream: int, rows: int) -> torch.Tensor:
    """(rows,) int64 in [0, 2**62): independent seeds that depend on run, batch and row, never on who generates them."""
    words = np.random.SeedSequence([run_seed, stream]).generate_state(rows, np.uint64)
    return torch.from_numpy((words >> np.uint64(2)).astype(np.int64))


def generate(
    rollout: RolloutClient | WorkerGroup,
    prompts: DataProto,
    sampling: Mapping[str, Any],
    seeds: torch.Tensor,
    min_version: int,
) -> DataProto:
    """`prompts` with their responses. Only what generation needs travels to the workers."""
    request = prompts.select(batch_keys=["prompts", "prompt_mask"], non_tensor_batch_keys=[])
    request = request.union(DataProto.from_dict({"seeds": seeds}))
    request.meta_info.update(sampling=dict(sampling), min_version=min_version)
    return prompts.select().union(rollout.generate_sequences(request))
