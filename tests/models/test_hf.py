"""Loading, writing and preparing Hugging Face models."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from podium.models.hf import disable_dropout, load_hf_config, load_pretrained, transformer_blocks, write_hf
from podium.utils.errors import UserError
from tests.models.tiny import ARCHITECTURES, ragged_batch, save_tiny, tiny_model

OPTIONS = {"gradient_checkpointing": False, "trust_remote_code": False}


def test_a_missing_or_broken_model_is_named_at_once(tmp_path: Path):
    with pytest.raises(UserError, match=r"actor\.path=.*no config\.json"):
        load_hf_config(str(tmp_path), "actor.path")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UserError, match=r"actor\.path=.*its config does not load"):
        load_hf_config(str(tmp_path), "actor.path")
    with pytest.raises(UserError, match="there is no such directory"):
        load_hf_config(str(tmp_path / "nowhere"), "actor.path")


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_gives_the_saved_weights(tmp_path: Path, name: str, dtype: torch.dtype):
    path = save_tiny(name, tmp_path)
    for auto_class, original in ((AutoModelForCausalLM, tiny_model(name)), (AutoModel, tiny_model(name).model)):
        model = load_pretrained(auto_class, path, dtype, **OPTIONS)
        expected = {n: p.to(dtype) for n, p in original.named_parameters()}
        torch.testing.assert_close(dict(model.named_parameters()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_that_the_directory_lacks_are_not_made_up(tmp_path: Path, lost: str):
    path = save_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=lost):
        load_pretrained(AutoModelForCausalLM, path, torch.float32, **OPTIONS)
    if lost == "lm_head.weight":
        load_pretrained(AutoModel, path, torch.float32, **OPTIONS)


def test_writing_over_an_older_model_leaves_nothing_of_it(tmp_path: Path):
    tiny_model("qwen2").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = tiny_model("llama", 3)
    write_hf(str(tmp_path), dict(model.named_parameters()), model.config, "LlamaForCausalLM")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


def test_blocks_are_the_repeated_layers():
    assert len(transformer_blocks(tiny_model("qwen3"))) == 2
    with pytest.raises(UserError, match="Linear names no transformer blocks"):
        transformer_blocks(torch.nn.Linear(1, 1))


SMALL = {"vocab_size": 101, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
WITH_DROPOUT = {
    "gpt2": transformers.GPT2Config(
        vocab_size=101, n_embd=32, n_head=2, n_layer=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    ),
    "opt": transformers.OPTConfig(
        **SMALL, ffn_dim=32, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, layerdrop=0.5
    ),
    "bloom": transformers.BloomConfig(
        vocab_size=101, hidden_size=32, n_head=2, n_layer=2, hidden_dropout=0.5, attention_dropout=0.5
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL, intermediate_size=32, hidden_dropout=0.5, attention_dropout=0.5),
    "falcon": transformers.FalconConfig(**SMALL, hidden_dropout=0.5, attention_dropout=0.5),
    "llama": transformers.LlamaConfig(**SMALL, intermediate_size=32, attention_dropout=0.5),
    "phi": transformers.PhiConfig(
        **SMALL, intermediate_size=32, resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5
    ),
}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_is_off_in_training_too(name: str):
    model = AutoModelForCausalLM.from_config(WITH_DROPOUT[name]).train()
    before = model.config.to_dict()
    inputs = ragged_batch(2)["input_ids"]
    first = model(inputs).logits
    # Several tries: two of OPT's forwards may drop every layer and agree.
    assert any(not torch.equal(model(inputs).logits, first) for _ in range(8)), "there is dropout to switch off"
    disable_dropout(model)
    expected = model(inputs).logits
    for _ in range(3):
        assert torch.equal(model(inputs).logits, expected)
    assert model.config.to_dict() == before, "an export keeps the model's own configuration"
