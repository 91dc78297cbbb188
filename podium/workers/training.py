"""What the trained roles (actor, critic) and the reference share: their tensors, their engine, their update loop."""

from typing import Any

import torch

from podium.protocol import DISPATCH_VALID, DataProto, Dispatch, Worker, register
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
    valid = tensors.pop(DISPATCH_VALID, None)
    if valid is not None:
        tensors["response_mask"] = tensors["response_mask"].bool() & valid[:, None]
    return tensors


class TrainedRole(Worker):
    """A role with a model that it trains: the actor and the critic, up to what they compute.

    Args:
        config: has ``strategy``, ``optim``, ``fsdp_config``, ``grad_clip``.
        objective: the loss to minimise; the algorithm's, so that the role knows none.
        mini_batch_rows: sequences on this rank in one optimizer step.
        micro_batch_rows: sequences in one forward and backward.
        epochs: passes over each batch.
        total_steps: optimizer steps of the run.
    """

    def __init__(
        self,
        config: Any,
        objective: LossFn,
        *,
        mini_batch_rows: int,
        micro_batch_rows: int,
        epochs: int = 1,
        total_steps: int,
    ):
        super().__init__()
        self._config, self._objective = config, objective
        self._mini_batch_rows, self._micro_batch_rows = mini_batch_rows, micro_batch_rows
        self._epochs, self._total_steps = epochs, total_steps

    def _start(self, module: torch.nn.Module, forward: Forward) -> None:
        """Lays the model out over the ranks."""
        config = self._config
        self._engine = build_engine(
            config.strategy, module, forward, config.fsdp_config, config.optim, self._total_steps, config.grad_clip
        )

    def _update(self, data: DataProto) -> list[dict[str, float]]:
        """One optimizer step for each mini-batch of each epoch, in the batch's order; the metrics of each step."""
        batch, rows = tensors_of(data), self._mini_batch_rows
        return [
            self._engine.train(
                {name: tensor[start : start + rows] for name, tensor in batch.items()},
                self._objective,
                self._micro_batch_rows,
            )
            for _ in range(self._epochs)
            for start in range(0, len(data), rows)
        ]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Writes weights, optimizer and schedule under the directory `path`."""
        self._engine.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Reads what `save_checkpoint` wrote, also from another number of ranks."""
        self._engine.load(path)
