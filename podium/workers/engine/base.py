"""The training engine: the only thing that differs between FSDP and Megatron."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from podium.utils.memory_buffer import FlatStage
from podium.utils.piece import Piece
from podium.utils.torch_functional import Denominator
from podium.workers.engine.offload import Offloadable

Tensors = dict[str, torch.Tensor]
LossFn = Callable[[Tensors, Tensors, Denominator], tuple[torch.Tensor, Tensors]]
"""``(outputs, micro_batch, denominator) -> (loss, metrics)``, all per-token tensors (b, R).

Loss and metrics are this micro-batch's share of the mini-batch: they are summed over micro-batches and ranks, except
metrics whose name ends in ``_max``, which are maximised.
"""


class NoUpdateError(RuntimeError):
    """A mini-batch made no optimizer step; weights and optimizer are as before, on all ranks alike."""


class NonFiniteError(NoUpdateError):
    """A loss or gradient is NaN or infinite."""


class EmptyBatchError(NoUpdateError):
    """There is no valid token: a step would be made of momentum and decay alone."""


@dataclass(frozen=True)
class Placement:
    """Which part of a batch a rank works on."""

    dp_rank: int
    """Number of its shard; ranks that split one copy of the model (tp, pp, cp) share a shard."""
    answers: bool
    """Whether its results are the ones that count: one rank of each shard."""


class TrainEngine(Offloadable):
    """A model with an optimizer, laid out over the ranks of a world.

    Parts of it may rest in host memory; every method brings the parts that it computes with, and who reads the views
    that `pieces` gives opens ``phase("params")`` around that.

    Batches are dicts of tensors with one row a sequence, each rank holding its data-parallel shard:
    ``input_ids``, ``attention_mask``, ``position_ids`` (b, P + R), ``responses``, ``response_mask`` (b, R) and
    whatever the loss reads. Outputs are (b, R): ``log_probs`` and ``entropy`` of a language model, ``values`` of
    a value model.
    """

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """This rank's place among the data-parallel shards."""

    @abstractmethod
    def infer(self, batch: Tensors, micro_batch_size: int) -> Tensors:
        """Outputs for each row of the shard, without gradients, on the CPU. Padded positions are 0."""

    @abstractmethod
    def train(self, batch: Tensors, loss_fn: LossFn, micro_batch_size: int) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns its metrics, alike on every rank, and ``grad_norm``, ``lr``.

        Raises:
            NoUpdateError: on all ranks alike; weights and optimizer are as before.
        """

    @abstractmethod
    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, whole, under their Hugging Face names, one at a time. Every rank must iterate to the end."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """What this rank holds of the weights that `export` gives. Every rank calls it.

        Views of its own memory, or of tensors made for this call where the engine keeps the weights in parts.
        """

    def adapter_off(self) -> AbstractContextManager[None]:
        """Within, `infer` computes with the frozen base of a model that has an adapter."""
        raise AssertionError(f"{type(self).__name__} has no adapter")

    def adapter_pieces(self) -> list[Piece]:
        """As `pieces`, of an adapter alone: ``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``, the scale in B."""
        raise AssertionError(f"{type(self).__name__} has no adapter")

    def flat_stage(self) -> FlatStage | None:
        """Where the weights of this rank's pipeline stage lie in flat memory; None where they do not. No collective."""
        return None

    @abstractmethod
    def save(self, path: str) -> None:
        """Writes weights, optimizer and scheduler under the directory `path`. Every rank calls it.

        Returns on no rank before all have written.
        """

    @abstractmethod
    def snapshot(self) -> Callable[[str], None]:
        """A copy of what `save` writes, as a function that writes it and may be called on another thread."""

    def random_state(self) -> dict[str, Any]:
        """Random streams that the engine keeps beside the process's own, as plain values that JSON holds."""
        return {}

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Takes up what `random_state` gave."""
        assert not state, "there are no such streams"

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes that `save` writes from this rank, to the nearest few per cent."""

    @abstractmethod
    def load(self, path: str) -> None:
        """Reads what `save` wrote, on any number of ranks."""

    @abstractmethod
    def save_hf(self, path: str) -> None:
        """Writes an ordinary Hugging Face directory. Every rank calls it; rank 0 writes."""


def metric_reducer(name: str) -> str:
    """How a metric combines over micro-batches and ranks: ``max`` for names that end in ``_max``, else ``sum``."""
    return "max" if name.endswith("_max") else "sum"


def accumulate(total: Tensors, part: Tensors) -> None:
    """Folds one micro-batch's metrics into `total`."""
    for name, value in part.items():
        value = value.detach()
        if name not in total:
            total[name] = value
        else:
            total[name] = torch.maximum(total[name], value) if metric_reducer(name) == "max" else total[name] + value


def reduce_metrics(metrics: Tensors, group: Any) -> dict[str, float]:
    """Combines the ranks' metrics: two collectives, whatever their number."""
    result: dict[str, float] = {}
    for kind, op in (("sum", torch.distributed.ReduceOp.SUM), ("max", torch.distributed.ReduceOp.MAX)):
        names = sorted(name for name in metrics if metric_reducer(name) == kind)
        if not names:
            continue
        packed = torch.stack([metrics[name].double() for name in names])
        torch.distributed.all_reduce(packed, op=op, group=group)
        result.update(zip(names, packed.tolist(), strict=True))
    return result
