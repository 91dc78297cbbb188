"""The actor: the policy that is trained."""

import dataclasses
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from podium.models.hf import load_pretrained
from podium.protocol import DataProto, Dispatch, Worker, register
from podium.workers.engine.base import LossFn
from podium.workers.engine.forward import forward_log_probs
from podium.workers.rollout.worker import RolloutWorker
from podium.workers.training import build_engine, run_updates, tensors_of
from podium.workers.weight_sync.colocated import sync_colocated


class ActorWorker(Worker):
    """Log-probs and updates of a causal language model.

    Args:
        model: has ``path``, ``trust_remote_code``, ``enable_gradient_checkpointing``.
        config: has ``strategy``, ``optim``, ``fsdp_config``, ``grad_clip``.
        objective: the loss to minimise; the algorithm's, so that this role knows none.
        temperature: of sampling; log-probs are taken there.
        entropy_grad: the objective differentiates the entropy.
        sum_pi_squared: `compute_log_prob` gives the sum of squared probabilities too.
        mini_batch_rows, micro_batch_rows, infer_rows: sequences on this rank in one optimizer step, in one forward and
            backward, and in one forward without gradients.
        epochs: passes over each batch.
        total_steps: optimizer steps of the run.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        objective: LossFn,
        *,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        mini_batch_rows: int,
        micro_batch_rows: int,
        infer_rows: int,
        epochs: int = 1,
        total_steps: int,
    ):
        super().__init__()
        self._model, self._config, self._objective = model, config, objective
        self._forward = partial(
            forward_log_probs, temperature=temperature, entropy_grad=entropy_grad, sum_pi_squared=sum_pi_squared
        )
        self._mini_batch_rows, self._micro_batch_rows, self._infer_rows = mini_batch_rows, micro_batch_rows, infer_rows
        self._epochs, self._total_steps = epochs, total_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model and lays it out over the ranks."""
        dtype = getattr(torch, self._config.fsdp_config.model_dtype)
        module = load_pretrained(
            AutoModelForCausalLM,
            self._model.path,
            dtype,
            gradient_checkpointing=self._model.enable_gradient_checkpointing,
            trust_remote_code=self._model.trust_remote_code,
        )
        self._engine = build_engine(
            self._config.strategy,
            module,
            self._forward,
            self._config.fsdp_config,
            self._config.optim,
            self._total_steps,
            self._config.grad_clip,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` (B, R) of the responses under the policy as it is.

        And ``sum_pi_squared`` (B, R), where it was asked for.
        """
        outputs = self._engine.infer(tensors_of(data), self._infer_rows)
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict({names.get(name, name): values for name, values in outputs.items()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> list[dict[str, float]]:
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
    def sync_weights(self, version: int, dtype: str, verify: str) -> dict[str, Any]:
        """Hands the weights to the rollout in this process, as `version`. Returns the ledger line of this rank."""
        rollout = self.peer("rollout")
        assert isinstance(rollout, RolloutWorker), "the colocated transport needs a rollout in the actor's process"
        return dataclasses.asdict(sync_colocated(self._engine, rollout.engine, version, getattr(torch, dtype), verify))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Writes weights, optimizer and schedule under the directory `path`."""
        self._engine.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Reads what `save_checkpoint` wrote, also from another number of ranks."""
        self._engine.load(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        """Writes the model as an ordinary Hugging Face directory."""
        self._engine.save_hf(path)
