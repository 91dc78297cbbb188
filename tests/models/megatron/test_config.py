"""Hugging Face configs as megatron-core's: what is refused, and in which words."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from podium.models.megatron import config as config_module
from podium.models.megatron.config import refuse_silent_corruption, rope_frequencies, transformer_config
from podium.models.megatron.parallel import MegatronLayout
from podium.utils.errors import UserError
from tests.models.tiny import tiny_model

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

Layout = MegatronLayout
COMMON = {
    "vocab_size": 32000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "transformers_version": "4.43.1",
}
# As published: older files, with fields that newer transformers read in another form, and some without effect.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        **{"model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 32768, "use_sliding_window": False},
        **{"max_window_layers": 21, "tie_word_embeddings": True, "attention_dropout": 0.0, "use_mrope": False},
    },
    "Qwen3-0.6B": {"model_type": "qwen3", "head_dim": 64, "rope_scaling": None, "attention_bias": False},
    "Llama-3.1-8B": {
        **{"model_type": "llama", "pretraining_tp": 1, "mlp_bias": False, "rope_theta": 5e5},
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
    },
    "Mistral-7B-v0.1": {"model_type": "mistral", "sliding_window": 4096},
    "Mixtral-8x7B": {
        **{"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
        **{"router_aux_loss_coef": 0.02, "sliding_window": None},
    },
    "Qwen3-30B-A3B": {
        **{"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 64},
    },
    "gemma-2b": {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 64},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **PUBLISHED[name]}))
    hf_config = AutoConfig.from_pretrained(tmp_path)
    config = transformer_config(hf_config, Layout(), dtype=torch.bfloat16)
    assert config.params_dtype == torch.bfloat16 and config.bf16
    assert (config.num_moe_experts or 0) == getattr(hf_config, "num_local_experts", 0)
    assert (config.window_size is not None) == (name == "Mistral-7B-v0.1")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "llama with attention_bias=True is not supported by strategy=megatron"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("llama", {"hidden_act": "relu"}, "hidden_act=relu: strategy=megatron knows silu, gelu_pytorch_tanh"),
        ("qwen2", {"layer_types": ["linear_attention", "full_attention"]}, "layer_types has linear_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=dynamic"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
        ),
    ],
)
def test_a_field_without_counterpart_is_refused_by_its_name(name: str, changes: dict, message: str):
    hf_config = tiny_model(name).config
    for field, value in changes.items():
        setattr(hf_config, field, value)
    with pytest.raises(UserError, match=message):
        transformer_config(hf_config, Layout())


def test_other_architectures_are_refused():
    hf_config = tiny_model("llama").config
    hf_config.model_type = "gemma2"
    with pytest.raises(UserError, match=r"model_type=gemma2: strategy=megatron knows llama, .* use strategy=fsdp"):
        transformer_config(hf_config, Layout())


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("llama", Layout(tp=3), "tensor_model_parallel_size=3: num_attention_heads=4 does not divide"),
        ("llama", Layout(pp=3), "pipeline_model_parallel_size .* 3 x 1: the model's 2 layers do not divide"),
        ("llama", Layout(ep=2), "expert_model_parallel_size=2 has no effect: llama has no experts"),
        ("mixtral", Layout(ep=3), "expert_model_parallel_size=3: num_local_experts=4 does not divide by it"),
        ("mixtral", Layout(tp=2), "tensor_model_parallel_size=2: with experts, .* sequence_parallel=true"),
    ],
)
def test_a_split_that_the_model_does_not_allow_is_refused(name: str, layout: Layout, message: str):
    with pytest.raises(UserError, match=message):
        transformer_config(tiny_model(name).config, layout)


def test_heads_and_widths_that_do_not_divide_are_refused():
    hf_config = tiny_model("llama").config
    hf_config.num_attention_heads = hf_config.num_key_value_heads = 6
    with pytest.raises(UserError, match="num_key_value_heads=6 neither divides by it nor divides it"):
        transformer_config(_with(hf_config, num_attention_heads=12), Layout(tp=4))
    with pytest.raises(UserError, match="intermediate_size=97 does not divide"):
        transformer_config(_with(tiny_model("llama").config, intermediate_size=97), Layout(tp=2))


def _with(hf_config: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(hf_config, name, value)
    return hf_config


@pytest.fixture
def built() -> Any:
    return transformer_config(tiny_model("llama", num_hidden_layers=4).config, Layout(pp=2, vpp=2))


def test_freed_activations_are_not_sent_over_gloo(built: Any):
    with pytest.raises(UserError, match="overlap_p2p_comm=true with deallocate_pipeline_outputs=true"):
        refuse_silent_corruption(
            dataclasses.replace(
                built, overlap_p2p_comm=True, deallocate_pipeline_outputs=True, pipeline_model_parallel_layout=None
            )
        )


def test_interleaved_stages_do_not_batch_sends_without_overlap(built: Any):
    with pytest.raises(UserError, match="virtual_pipeline_model_parallel_size with batch_p2p_comm=true"):
        refuse_silent_corruption(
            dataclasses.replace(built, batch_p2p_comm=True, overlap_p2p_comm=False, pipeline_model_parallel_layout=None)
        )


def test_interleaved_stages_do_not_tell_each_other_lengths(built: Any):
    with pytest.raises(UserError, match="virtual_pipeline_model_parallel_size with variable_seq_lengths=true"):
        refuse_silent_corruption(
            dataclasses.replace(built, variable_seq_lengths=True, pipeline_model_parallel_layout=None)
        )


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=2, vpp=2), Layout(tp=2, pp=2, vpp=2)])
def test_no_layout_makes_what_is_refused(layout: Layout, cuda: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config_module, "is_cuda", lambda: cuda)
    config = transformer_config(tiny_model("llama", num_hidden_layers=4).config, layout)
    assert config.variable_seq_lengths == (layout.vpp == 1) and not config.deallocate_pipeline_outputs
    assert config.overlap_p2p_comm == (cuda and layout.vpp > 1)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotations_are_those_of_transformers(kind: str):
    rope = {
        **{"rope_type": kind, "rope_theta": 5e3, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("llama", rope_parameters=rope)
    frequencies, scale = rope_frequencies(model.config)
    torch.testing.assert_close(frequencies, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert scale == model.model.rotary_emb.attention_scaling
    assert (scale != 1.0) == (kind == "yarn")
