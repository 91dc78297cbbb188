"""The critic: the value of each state that a response passes through."""

from typing import Any

import torch

from podium.models.value_head import load_value_model
from podium.protocol import DataProto, Dispatch, Worker, register
from podium.workers.engine.base import LossFn
from podium.workers.engine.forward import forward_values
from podium.workers.training import build_engine, run_updates, tensors_of


class CriticWorker(Worker):
    """Values and updates of a value model.

    Args:
        model_path: Hugging Face directory of the backbone.
        config: has ``strategy``, ``model``, ``optim``, ``fsdp_config``, ``grad_clip``.
        objective: the loss to minimise.
        mini_batch_rows, micro_batch_rows, epochs, total_steps: as for `ActorWorker`.
    """

    def __init__(
        self,
        model_path: str,
        config: Any,
        objective: LossFn,
        *,
        mini_batch_rows: int,
        micro_batch_rows: int,
        epochs: int,
        total_steps: int,
    ):
        super().__init__()
        self._model_path, self._config, self._objective = model_path, config, objective
        self._mini_batch_rows, self._micro_batch_rows = mini_batch_rows, micro_batch_rows
        self._epochs, self._total_steps = epochs, total_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the backbone, puts a value head on it, and lays both out over the ranks."""
        module = load_value_model(
            self._model_path,
            getattr(torch, self._config.fsdp_config.model_dtype),
            gradient_checkpointing=self._config.model.enable_gradient_checkpointing,
            trust_remote_code=self._config.model.trust_remote_code,
        )
        self._engine = build_engine(
            self._config.strategy,
            module,
            forward_values,
            self._config.fsdp_config,
            self._config.optim,
            self._total_steps,
            self._config.grad_clip,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` (B, R): position t holds the value of the state in which response token t is chosen."""
        return DataProto.from_dict(self._engine.infer(tensors_of(data), self._micro_batch_rows))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, data: DataProto) -> list[dict[str, float]]:
        """Trains on the batch; returns the metrics of each optimizer step, the same on every rank."""
        return run_updates(
            self._engine,
            data,
            self._objective,
            mini_batch_rows=self._mini_batch_rows,
            micro_batch_rows=self._micro_batch_rows,
            epochs=self._epochs,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Writes weights, optimizer and schedule under the directory `path`."""
        self._engine.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Reads what `save_checkpoint` wrote, also from another number of ranks."""
        self._engine.load(path)
