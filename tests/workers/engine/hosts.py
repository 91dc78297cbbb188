"""A worker that holds one engine, and losses for it. A module of its own, because processes import it."""

import copy
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from podium.models.hf import load_pretrained
from podium.models.lora import LoRA, add_lora
from podium.models.value_head import load_value_model
from podium.protocol import DataProto, Dispatch, Worker, register
from podium.trainer.config.shared import FSDPConfig, OptimConfig
from podium.utils.piece import Piece
from podium.utils.torch_functional import Denominator
from podium.workers.engine.base import NonFiniteError, Tensors, TrainEngine
from podium.workers.engine.forward import forward_log_probs, forward_values
from podium.workers.engine.fsdp import FSDPEngine
from podium.workers.engine.offload import PARTS, Part
from podium.workers.training import tensors_of

TEMPERATURE = 0.7
ENTROPY_COEFF = 0.05


class RestingHost:
    """What a host's engine has on the device while some of it rests on the host."""

    engine: Any

    @register(Dispatch.ONE_TO_ALL)
    def held_bytes(self) -> dict[str, int]:
        return held(self.engine)

    @register(Dispatch.ONE_TO_ALL)
    def pieces_while_away(self) -> int:
        return len(self.engine.pieces())

    @register(Dispatch.ONE_TO_ALL)
    def held_in_phase(self, *parts: Part) -> dict[str, int]:
        with self.engine.phase(*parts):
            return held(self.engine)


class EngineHost(RestingHost, Worker):
    """Builds engines and does with them as it is told."""

    @register(Dispatch.ONE_TO_ALL)
    def build(
        self,
        path: str,
        *,
        value: bool = False,
        fsdp: FSDPConfig | None = None,
        optim: OptimConfig | None = None,
        total_steps: int = 10,
        grad_clip: float = 1.0,
        checkpointing: bool = False,
        lora: LoRA | None = None,
    ) -> None:
        options: dict[str, Any] = {"gradient_checkpointing": checkpointing, "trust_remote_code": False}
        dtype = getattr(torch, fsdp.model_dtype) if fsdp is not None else torch.float32
        if value:
            module: torch.nn.Module = load_value_model(path, dtype, **options)
            forward: Any = forward_values
        else:
            module = load_pretrained(AutoModelForCausalLM, path, dtype, **options)
            forward = partial(forward_log_probs, temperature=TEMPERATURE, entropy_grad=True)
        adapter = add_lora(module, getattr(module, "backbone", module), lora) if lora is not None else None
        self.engine = FSDPEngine(
            module, forward, fsdp or FSDPConfig(), optim or small_steps(), total_steps, grad_clip, adapter
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def infer(self, data: DataProto, micro: int) -> DataProto:
        return DataProto.from_dict(self.engine.infer(tensors_of(data), micro))

    @register(Dispatch.DP_COMPUTE_METRIC)
    def train(self, data: DataProto, loss_fn: Any, micro: int) -> dict[str, float] | str:
        try:
            return self.engine.train(tensors_of(data), loss_fn, micro)
        except NonFiniteError as error:
            return str(error)

    @register(Dispatch.ONE_TO_ALL)
    def weights(self, dtype: str = "float32") -> Tensors:
        return {name: tensor.clone() for name, tensor in self.engine.export(getattr(torch, dtype))}

    @register(Dispatch.ONE_TO_ALL)
    def optimizer_state(self) -> list[Any]:
        """This rank's part of the optimizer's state, and the schedule."""
        optimizer, scheduler = self.engine._optimizer, self.engine._scheduler
        assert optimizer is not None and scheduler is not None
        with self.engine.phase("optimizer"):
            local = [
                {key: getattr(value, "_local_tensor", value).clone() for key, value in state.items()}
                for state in optimizer.state.values()
            ]
        return [local, [group["lr"] for group in optimizer.param_groups], copy.deepcopy(scheduler.state_dict())]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def infer_base(self, data: DataProto, micro: int) -> DataProto:
        with self.engine.adapter_off():
            return DataProto.from_dict(self.engine.infer(tensors_of(data), micro))

    @register(Dispatch.ONE_TO_ALL)
    def parameters(self) -> Tensors:
        """All parameters, whole, under the names of the module as it is."""
        named = self.engine._module.named_parameters()
        return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in named}

    @register(Dispatch.ONE_TO_ALL)
    def pieces(self) -> list[Piece]:
        return self.engine.pieces()

    @register(Dispatch.ONE_TO_ALL)
    def state_bytes(self) -> int:
        return self.engine.state_bytes()

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path: str) -> None:
        self.engine.save(path)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, path: str) -> None:
        self.engine.load(path)

    @register(Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        self.engine.save_hf(path)


def held(engine: TrainEngine) -> dict[str, int]:
    """Bytes on the device, by part."""
    storages = {part: {s.data_ptr(): s for s in map(_storage, engine.memory(part))} for part in PARTS}
    return {part: sum(storage.nbytes() for storage in each.values()) for part, each in storages.items()}


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def small_steps(**changes: Any) -> OptimConfig:
    """AdamW whose eps keeps rounding noise in tiny gradients from becoming whole steps."""
    return OptimConfig(**{"lr": 2e-3, "eps": 1e-4, "weight_decay": 0.1, "lr_warmup_steps": 2, **changes})


def weighted_log_probs(outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
    """Advantage-weighted likelihood and an entropy bonus, a token mean."""
    each = batch["advantages"] * outputs["log_probs"] + ENTROPY_COEFF * outputs["entropy"]
    loss = -torch.where(batch["response_mask"], each, 0.0).sum() / denominator.tokens
    largest = torch.where(batch["response_mask"], outputs["log_probs"], -torch.inf).amax()
    return loss, {"loss": loss.detach(), "log_prob_max": largest}


def squared_error(outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
    """A token mean."""
    each = (outputs["values"] - batch["returns"]).square()
    loss = torch.where(batch["response_mask"], each, 0.0).sum() / denominator.tokens
    return loss, {"loss": loss.detach()}


def infinite_constant(outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
    """Infinite, with a finite gradient."""
    loss, metrics = weighted_log_probs(outputs, batch, denominator)
    return loss + float("inf"), metrics


def fails_on_second(outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
    """Raises in the micro-batch that holds the row marked by an advantage of 1000."""
    if (batch["advantages"] == 1000.0).any():
        raise ArithmeticError("marked")
    return weighted_log_probs(outputs, batch, denominator)
