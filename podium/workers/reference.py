"""The reference: the policy as it was before training, which the KL holds the actor to."""

from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from podium.models.hf import load_pretrained
from podium.protocol import DataProto, Dispatch, Worker, register
from podium.workers.engine.forward import forward_log_probs
from podium.workers.training import build_engine, tensors_of


class ReferenceWorker(Worker):
    """Log-probs of a frozen causal language model.

    Args:
        model: has ``path``, ``trust_remote_code``.
        strategy: of the engine.
        fsdp_config: layout and precision.
        temperature: of sampling, as for the actor.
        infer_rows: sequences in one forward on this rank.
    """

    def __init__(self, model: Any, strategy: str, fsdp_config: Any, *, temperature: float, infer_rows: int):
        super().__init__()
        self._model, self._strategy, self._fsdp_config = model, strategy, fsdp_config
        self._temperature, self._infer_rows = temperature, infer_rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model and lays it out over the ranks."""
        module = load_pretrained(
            AutoModelForCausalLM,
            self._model.path,
            getattr(torch, self._fsdp_config.model_dtype),
            gradient_checkpointing=False,
            trust_remote_code=self._model.trust_remote_code,
        )
        forward = partial(forward_log_probs, temperature=self._temperature, entropy_grad=False)
        self._engine = build_engine(self._strategy, module.requires_grad_(False), forward, self._fsdp_config)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` (B, R)."""
        outputs = self._engine.infer(tensors_of(data), self._infer_rows)
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})
