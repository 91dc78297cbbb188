"""Which layers of a model get adapters, and what is refused before anything starts."""

import sys
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from podium.models.lora import LoRA, add_lora, check_lora, find_targets
from podium.trainer.config.shared import ModelConfig
from podium.utils.errors import UserError
from tests.models.tiny import tiny_model

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def leaves(names: list[str]) -> list[str]:
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))


def check(name: str, auto_class: Any = AutoModelForCausalLM, **keys: Any) -> None:
    check_lora(tiny_model(name).config, ModelConfig(**{"lora_rank": 2, **keys}), auto_class, "actor.model")


def test_all_linear_is_every_linear_layer_but_the_head():
    for name in ("llama", "llama_tied", "qwen3"):
        model = tiny_model(name)
        assert leaves(find_targets(model, None)) == LAYERS
        assert find_targets(model, None) == [f"model.{name}" for name in find_targets(model.model, None)]
    assert leaves(find_targets(tiny_model("mixtral"), None)) == LAYERS[:4], "experts are no linear layers"


def test_a_name_is_the_end_of_names():
    model = tiny_model("llama")
    assert find_targets(model, ("v_proj",)) == [f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)]
    assert find_targets(model, ("layers.1.self_attn.v_proj", "v_proj")) == [
        f"model.layers.{i}.self_attn.v_proj" for i in (1, 0)
    ]
    assert find_targets(model, ("lm_head",)) == ["lm_head"]


def test_names_that_do_not_exist_are_refused_with_those_that_do():
    check("llama", target_modules=["q_proj", "lm_head"])
    check("llama", auto_class=AutoModel, target_modules="q_proj")
    listed = "are " + ", ".join(LAYERS)
    for name, auto_class, target in (
        ("llama", AutoModelForCausalLM, "query"),
        ("llama", AutoModelForCausalLM, "proj"),
        ("llama", AutoModelForCausalLM, "input_layernorm"),
        ("llama_tied", AutoModelForCausalLM, "lm_head"),
        ("llama", AutoModel, "lm_head"),
    ):
        with pytest.raises(
            UserError, match=rf"actor\.model\.target_modules has {target}; the linear layers of Llama\w+ {listed}"
        ):
            check(name, auto_class, target_modules=["q_proj", target])


@pytest.mark.parametrize("wanted", [[], 3, ["q_proj", 3], {"q_proj": 1}])
def test_targets_are_names(wanted: Any):
    with pytest.raises(UserError, match=r"actor\.model\.target_modules=.*: expected all-linear, or a list"):
        check("llama", target_modules=wanted)


def test_a_missing_peft_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"actor\.model\.lora_rank=2, but peft is not installed: pip install 'podium\[lora\]"
    ):
        check("llama")
    check("llama", lora_rank=0)


def test_adapters_are_drawn_by_the_seed_alone():
    def drawn(seed: int, draws_before: int) -> dict[str, torch.Tensor]:
        model = tiny_model("llama")
        torch.manual_seed(draws_before)
        before = torch.get_rng_state()
        adapter = add_lora(model, model, LoRA(2, 4, seed=seed))
        assert torch.equal(torch.get_rng_state(), before)
        return {name: p.detach() for name, p in model.named_parameters() if name in adapter.trained}

    first, same, other = drawn(0, 1), drawn(0, 2), drawn(1, 1)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == (".lora_B." in name) for name in first)


@pytest.mark.parametrize("name", ["qwen2", "llama_tied", "qwen3_moe"])
def test_merged_weights_are_those_of_a_plain_model_that_computes_the_same(name: str):
    plain, model = tiny_model(name), tiny_model(name)
    adapter = add_lora(model, model, LoRA(2, 6))
    merged = dict(adapter.merged())
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    for name_, parameter in plain.named_parameters():
        assert torch.equal(merged[name_], parameter), "B is 0"
    for _, parameter in adapter.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 8)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        untouched = plain(input_ids=ids).logits
        plain.load_state_dict(dict(adapter.merged()), strict=False)
        adapted = model(input_ids=ids).logits
        torch.testing.assert_close(plain(input_ids=ids).logits, adapted, rtol=0, atol=1e-4)
        assert (adapted - untouched).abs().max() > 0.1
        with adapter.off():
            assert torch.equal(model(input_ids=ids).logits, untouched)
    factors = dict(adapter.factors())
    assert len(factors) == 2 * len(adapter.layers)
