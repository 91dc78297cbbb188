"""DAPO's dynamic sampling (arXiv 2503.14476): only prompts that teach something make up a batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from podium.protocol import DataProto
from podium.trainer.ppo.registry import unknown_name
from podium.trainer.ppo.sampling import needs_refill, rows_with_signal, take_groups
from podium.trainer.ppo.source import RolloutSource

METRICS = ("score", "seq_reward")
"""What groups may be judged by, beside the keys that the reward function returns."""


class DynamicSampling:
    """Draws batches from another source until enough prompts have responses that differ in a metric.

    Prompts beyond that number are dropped: by the next step their responses would be another policy's.

    Args:
        source: each of its batches has `groups` prompts.
        metric: see `METRICS`.
        groups: prompts in a training batch.
        max_num_gen_batches: most batches drawn for one; 0 is no limit.
    """

    def __init__(self, source: RolloutSource, metric: str, groups: int, max_num_gen_batches: int):
        self._source, self._metric = source, metric
        self._groups, self._max_num_gen_batches = groups, max_num_gen_batches

    @property
    def min_version(self) -> int:
        """Oldest weights that may answer."""
        return self._source.min_version

    @min_version.setter
    def min_version(self, version: int) -> None:
        self._source.min_version = version

    @property
    def epoch(self) -> int:
        """Passes over the data that are behind the last batch."""
        return self._source.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._source.epoch = epoch

    def __next__(self) -> DataProto:
        """A batch of `groups` prompts.

        Raises:
            UserError: too few of them in `max_num_gen_batches` batches.
        """
        kept: list[DataProto] = []
        groups = 0
        while needs_refill(groups, self._groups, len(kept), self._max_num_gen_batches):
            batch = next(self._source)
            scores = judged_by(batch, self._metric)
            judged = _answered(batch) & ~scores.isnan()
            rows = rows_with_signal(scores, batch.non_tensor_batch["uid"], judged)
            kept.append(batch.select_idxs(torch.nonzero(rows).flatten()))
            groups += len(set(kept[-1].non_tensor_batch["uid"]))
        batch = _concat(kept)
        rows = take_groups(batch.non_tensor_batch["uid"], torch.ones(len(batch), dtype=torch.bool), self._groups)
        batch = batch.select_idxs(rows)
        batch.meta_info["metrics"] |= {
            "filter_groups/num_gen_batches": len(kept),
            "filter_groups/with_signal": groups / (len(kept) * self._groups),
            "filter_groups/surplus": groups - self._groups,
        }
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Of the source: nothing is kept from one batch to the next."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._source.load_state_dict(state)


def judged_by(batch: DataProto, metric: str) -> torch.Tensor:
    """(B,) float64 scores, NaN where a row has none.

    Raises:
        UserError: the reward function returns no such key.
    """
    assert batch.batch is not None
    if metric == "score":
        return batch.batch["sequence_scores"].double()
    if metric == "seq_reward":
        return batch.batch["token_level_scores"].sum(dim=-1).double()
    if metric not in batch.non_tensor_batch:
        raise unknown_name("algorithm.filter_groups.metric", metric, [*METRICS, *batch.non_tensor_batch])
    values = [np.nan if value is None else value for value in batch.non_tensor_batch[metric]]
    return torch.tensor(np.asarray(values, dtype=np.float64))


def _answered(batch: DataProto) -> torch.Tensor:
    """(B,) bool: rows with a token; an empty response has no advantage, whatever its score."""
    assert batch.batch is not None
    return batch.batch["response_mask"].bool().any(dim=-1)


def _concat(batches: list[DataProto]) -> DataProto:
    """One batch; keys that the reward function returned in some of them are None in the others."""
    names = dict.fromkeys(name for batch in batches for name in batch.non_tensor_batch)
    for batch in batches:
        for name in names:
            if name not in batch.non_tensor_batch:
                batch.non_tensor_batch[name] = np.full(len(batch), None, dtype=object)
    whole = DataProto.concat(batches)
    whole.meta_info["metrics"] = {
        name: _reduce(name)(values) for name, values in whole.meta_info.get("metrics", {}).items()
    }
    return whole


def _reduce(name: str) -> Any:
    return {"min": np.min, "max": np.max}.get(name.rsplit("/", 1)[-1], np.mean)
