"""A Hugging Face config as megatron-core's, or a refusal that names the field that has no counterpart."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from podium.models.megatron.parallel import KEYS, MegatronLayout
from podium.utils.device import is_cuda
from podium.utils.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """What a family of models has beside the common parts, which are Llama's."""

    qkv_bias: bool = False
    qk_norm: bool = False
    expert_ffn_field: str = ""
    """Of the config: hidden units of an expert. Empty: the model is dense."""
    experts_name: str = ""
    """Of the experts' tensors in a checkpoint."""
    gemma: bool = False
    """Norms scale by 1 + weight, embeddings by sqrt(hidden_size), and the gate is GELU's."""


ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True),
    "gemma": Architecture(gemma=True),
    "qwen3_moe": Architecture(qk_norm=True, expert_ffn_field="moe_intermediate_size", experts_name="mlp.experts"),
    "mixtral": Architecture(expert_ffn_field="intermediate_size", experts_name="block_sparse_moe.experts"),
}
"""By ``model_type`` of the Hugging Face config."""

# Fields that are read below.
_READ = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *("tie_word_embeddings", "num_local_experts", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("layer_types", "sliding_window", "use_sliding_window"),
}
# Fields that change nothing in a forward without cache and dropout.
_WITHOUT_EFFECT = {
    *("transformers_version", "architectures", "dtype", "id2label", "label2id", "num_labels", "problem_type"),
    *("initializer_range", "use_cache", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("pretraining_tp", "attention_dropout", "max_window_layers", "output_router_logits", "router_aux_loss_coef"),
    *(
        "router_jitter_noise",
        "hidden_activation",
        "_name_or_path",
        "output_hidden_states",
        "output_attentions",
        "return_dict",
    ),
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def architecture_of(hf_config: Any) -> Architecture:
    """Raises `UserError` where the name map and the layers know no such model."""
    model_type = hf_config.model_type
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"model_type={model_type}: strategy=megatron knows {', '.join(ARCHITECTURES)}; use strategy=fsdp for others"
        )
    return ARCHITECTURES[model_type]


def padded_vocab_size(hf_config: Any, layout: MegatronLayout) -> int:
    """Rows of the embedding over all tensor-parallel ranks: the vocabulary, rounded up to a multiple of tp."""
    return -(-hf_config.vocab_size // layout.tp) * layout.tp


def head_dim(hf_config: Any) -> int:
    """Width of an attention head."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def transformer_config(
    hf_config: Any, layout: MegatronLayout, *, dtype: torch.dtype = torch.float32, recompute: bool = False
) -> Any:
    """megatron-core's ``TransformerConfig`` of a Hugging Face causal language model.

    Args:
        dtype: of parameters and activations, float32 or bfloat16.
        recompute: keep only the input of each layer in forward and compute the rest again in backward.

    Raises:
        UserError: the model, or its split over `layout`, is not supported; names the field or the configuration key.
    """
    from megatron.core.transformer import TransformerConfig

    family = architecture_of(hf_config)
    _refuse_unknown_fields(hf_config)
    _check_split(hf_config, layout, family)
    size, heads, layers = hf_config.hidden_size, hf_config.num_attention_heads, hf_config.num_hidden_layers
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        layernorm_zero_centered_gamma=family.gemma,
        qk_layernorm=family.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        gated_linear_unit=True,
        activation_func=_activation(hf_config),
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=head_dim(hf_config) ** -0.5 * rope_frequencies(hf_config)[1] ** 2,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # weights are loaded
        **_parallel_fields(layout, layers),
        **_window_fields(hf_config),
        **(_expert_fields(hf_config, family) if family.expert_ffn_field else {}),
        **(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if recompute
            else {}
        ),
    )
    refuse_silent_corruption(config)
    return config


def rope_frequencies(hf_config: Any) -> tuple[torch.Tensor, float]:
    """Rotations a token (head_dim / 2,) float32, and the factor on the rotated vectors that some scalings have.

    They are transformers' own, so that every scaling that does not depend on the sequence's length comes out alike.

    Raises:
        UserError: the scaling depends on the sequence's length, or turns a part of the head only.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, width = hf_config.rope_parameters, head_dim(hf_config)
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise UserError(f"rope_parameters.rope_type={kind}: strategy=megatron knows {', '.join(_ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("rope_parameters.partial_rotary_factor is not supported by strategy=megatron")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return 1.0 / rope["rope_theta"] ** exponents, 1.0


def refuse_silent_corruption(config: Any) -> None:
    """Refuses combinations with which megatron-core computes wrong gradients and reports nothing.

    Raises:
        UserError: names the fields.
    """
    if config.overlap_p2p_comm and config.deallocate_pipeline_outputs and not is_cuda():
        raise UserError(
            "overlap_p2p_comm=true with deallocate_pipeline_outputs=true: gloo still reads activations that have been "
            "freed, and gradients come out wrong; turn one of them off"
        )
    interleaved = (config.virtual_pipeline_model_parallel_size or 1) > 1
    if interleaved and config.batch_p2p_comm and not config.overlap_p2p_comm:
        raise UserError(
            f"{KEYS['vpp']} with batch_p2p_comm=true and overlap_p2p_comm=false: sends and receives between two "
            "interleaved stages are paired wrongly, and gradients come out wrong; set batch_p2p_comm=false"
        )
    if interleaved and config.variable_seq_lengths:
        raise UserError(
            f"{KEYS['vpp']} with variable_seq_lengths=true: the messages that tell the lengths are paired wrongly "
            "between two interleaved stages; pad all micro-batches to one length"
        )


def _parallel_fields(layout: MegatronLayout, num_layers: int) -> dict[str, Any]:
    stages = [["decoder"] * count for count in layout.layers_by_stage(num_layers)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_layout": stages if layout.pp > 1 else None,
        # Of the dispatchers only this one allows micro-batches of different lengths, even without experts.
        "moe_token_dispatcher_type": "alltoall",
        # See `refuse_silent_corruption`. Where there is CUDA, interleaved stages send while they compute.
        "variable_seq_lengths": layout.vpp == 1,
        "batch_p2p_comm": layout.vpp == 1,
        "overlap_p2p_comm": layout.vpp > 1 and is_cuda(),
        "deallocate_pipeline_outputs": False,
    }


def _expert_fields(hf_config: Any, family: Architecture) -> dict[str, Any]:
    return {
        "num_moe_experts": hf_config.num_local_experts,
        "moe_ffn_hidden_size": getattr(hf_config, family.expert_ffn_field),
        "moe_router_topk": hf_config.num_experts_per_tok,
        # Weights of the chosen experts: softmax over all experts (pre), or over the chosen ones.
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def _window_fields(hf_config: Any) -> dict[str, Any]:
    """Which layers see only the tokens before them that fit a window."""
    layers = hf_config.num_hidden_layers
    slides = getattr(hf_config, "sliding_window", None) and getattr(hf_config, "use_sliding_window", True)
    kinds = getattr(hf_config, "layer_types", None) or ["sliding_attention" if slides else "full_attention"] * layers
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UserError(f"layer_types has {unknown[0]}: strategy=megatron knows full_attention and sliding_attention")
    if "sliding_attention" not in kinds:
        return {}
    return {
        "window_size": (hf_config.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def _activation(hf_config: Any) -> Any:
    known = {"silu": silu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}
    if hf_config.hidden_act not in known:
        raise UserError(f"hidden_act={hf_config.hidden_act}: strategy=megatron knows {', '.join(known)}")
    return known[hf_config.hidden_act]


def _refuse_unknown_fields(hf_config: Any) -> None:
    """A field that nothing here reads must have its default: anything else may change what the model computes."""
    defaults = type(hf_config)().to_dict()
    for name, value in hf_config.to_dict().items():
        if name in _READ | _WITHOUT_EFFECT or value == defaults.get(name):
            continue
        if name in defaults or value:
            raise UserError(f"{hf_config.model_type} with {name}={value!r} is not supported by strategy=megatron")


def _check_split(hf_config: Any, layout: MegatronLayout, family: Architecture) -> None:
    heads, groups, tp = hf_config.num_attention_heads, hf_config.num_key_value_heads, KEYS["tp"]
    if heads % layout.tp:
        raise UserError(f"{tp}={layout.tp}: num_attention_heads={heads} does not divide by it")
    if groups % layout.tp and layout.tp % groups:
        raise UserError(f"{tp}={layout.tp}: num_key_value_heads={groups} neither divides by it nor divides it")
    field = family.expert_ffn_field or "intermediate_size"
    if (width := getattr(hf_config, field)) % layout.expert_tp:
        raise UserError(f"{tp}={layout.tp}: {field}={width} does not divide by it")
    if not family.expert_ffn_field:
        if layout.ep > 1:
            raise UserError(f"{KEYS['ep']}={layout.ep} has no effect: {hf_config.model_type} has no experts")
    elif (experts := hf_config.num_local_experts) % layout.ep:
        raise UserError(f"{KEYS['ep']}={layout.ep}: num_local_experts={experts} does not divide by it")
    elif layout.tp > 1 and not layout.sequence_parallel:
        raise UserError(f"{tp}={layout.tp}: with experts, megatron-core needs sequence_parallel=true as well")
