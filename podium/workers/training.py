"""What the trained roles (actor, critic) and the reference share: their tensors, their engine, their update loop."""

from typing import Any

import torch

from podium.protocol import DataProto
from podium.utils.errors import UserError
from podium.workers.engine.base import LossFn, Tensors, TrainEngine
from podium.workers.engine.fsdp import Forward, FSDPEngine


def build_engine(
    strategy: str,
    module: torch.nn.Module,
    forward: Forward,
    fsdp_config: Any,
    optim_config: Any | None = None,
    total_steps: int = 1,
    grad_clip: float = 1.0,
) -> TrainEngine:
    """The engine that the configuration's ``strategy`` names.

    Raises:
        UserError: there is no such engine.
    """
    if strategy != "fsdp":
        raise UserError(f"strategy={strategy}: the only training engine is fsdp")
    return FSDPEngine(module, forward, fsdp_config, optim_config, total_steps, grad_clip)


def tensors_of(data: DataProto) -> Tensors:
    """The batch's tensors; rows that a dispatcher added to fill a shard lose their response mask."""
    assert data.batch is not None
    tensors = dict(data.batch.items())
    valid = tensors.pop("dispatch_valid", None)
    if valid is not None:
        tensors["response_mask"] = tensors["response_mask"].bool() & valid[:, None]
    return tensors


def run_updates(
    engine: TrainEngine, data: DataProto, loss_fn: LossFn, *, mini_batch_rows: int, micro_batch_rows: int, epochs: int
) -> list[dict[str, float]]:
    """One optimizer step for each mini-batch of each epoch, in the batch's order.

    Args:
        mini_batch_rows: this rank's rows of a mini-batch.
        micro_batch_rows: rows in one forward and backward.

    Returns:
        The metrics of each optimizer step.
    """
    batch = tensors_of(data)
    rows = len(data)
    return [
        engine.train({name: t[start : start + mini_batch_rows] for name, t in batch.items()}, loss_fn, micro_batch_rows)
        for _ in range(epochs)
        for start in range(0, rows, mini_batch_rows)
    ]
