"""From a configuration to the engine that it names."""

from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from podium.models.hf import load_pretrained
from podium.models.lora import add_lora
from podium.models.megatron import require_megatron
from podium.models.value_head import ValueModel, load_reward_model, load_value_model
from podium.utils.errors import UserError
from podium.workers.engine.base import TrainEngine
from podium.workers.engine.forward import forward_log_probs, forward_scores, forward_values
from podium.workers.engine.fsdp import Forward, FSDPEngine
from podium.workers.engine.spec import LogProbs, ModelSpec, Scores, Training


def build_engine(strategy: str, config: Any, model: ModelSpec, training: Training | None = None) -> TrainEngine:
    """The engine called `strategy`, with the model loaded and laid out over the ranks.

    Args:
        config: has the engine's own section, ``fsdp_config`` or ``megatron``.
        training: None for a model that is never trained.

    Raises:
        UserError: there is no such engine, or it cannot run the model.
    """
    if strategy == "fsdp":
        return _fsdp(config.fsdp_config, model, training)
    if strategy == "megatron":
        require_megatron()
        from podium.workers.engine.megatron import MegatronEngine

        return MegatronEngine(model, config.megatron, training)
    raise UserError(f"strategy={strategy}: the training engines are fsdp and megatron")


def _fsdp(config: Any, model: ModelSpec, training: Training | None) -> FSDPEngine:
    options: dict[str, Any] = {
        "gradient_checkpointing": model.recompute,
        "trust_remote_code": model.trust_remote_code,
    }
    dtype, outputs = getattr(torch, config.model_dtype), model.outputs
    if isinstance(outputs, LogProbs):
        module = load_pretrained(AutoModelForCausalLM, model.path, dtype, **options)
        forward: Forward = partial(
            forward_log_probs,
            temperature=outputs.temperature,
            entropy_grad=outputs.entropy_grad,
            sum_pi_squared=outputs.sum_pi_squared,
        )
    elif isinstance(outputs, Scores):
        load = load_reward_model if outputs.has_head else load_value_model
        module, forward = load(model.path, dtype, **options), forward_scores
        if outputs.pad_token_id is not None:
            module.config.pad_token_id = outputs.pad_token_id
    else:
        module, forward = load_value_model(model.path, dtype, **options), forward_values
    backbone = module.backbone if isinstance(module, ValueModel) else module
    adapter = add_lora(module, backbone, model.lora) if model.lora is not None else None
    if training is None:
        return FSDPEngine(module.requires_grad_(False), forward, config, adapter=adapter)
    return FSDPEngine(module, forward, config, training.optim, training.total_steps, training.grad_clip, adapter)
