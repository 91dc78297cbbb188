"""The critic's model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from podium.models.hf import transformer_blocks, write_hf
from podium.models.value_head import load_reward_model, load_value_model
from podium.utils.errors import UserError
from tests.models.tiny import save_tiny, tiny_model


def test_values_start_at_zero_on_an_untouched_backbone(tmp_path: Path):
    path = save_tiny("qwen2", tmp_path)
    model = load_value_model(path, torch.float32, gradient_checkpointing=False, trust_remote_code=False)
    ids = torch.randint(2, 101, (2, 9))
    values = model(ids, None, torch.arange(9).expand(2, 9))
    assert values.shape == (2, 9, 1) and not values.any()
    values.sum().backward()
    assert model.score.weight.grad is not None and model.score.weight.grad.any()
    backbone = {f"model.{name}": p for name, p in tiny_model("qwen2").model.named_parameters()}
    assert {n for n, _ in model.named_parameters()} == {*backbone, "score.weight"}
    for name, parameter in model.named_parameters():
        if name in backbone:
            torch.testing.assert_close(parameter, backbone[name], rtol=0, atol=0)
    assert model.hf_architecture == "Qwen2ForSequenceClassification"
    assert model.config.num_labels == 1
    assert len(transformer_blocks(model)) == 2


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gpt2"])
def test_what_is_saved_loads_as_a_sequence_classifier_and_again_as_a_reward_model(tmp_path: Path, name: str):
    """GPT-2 calls its backbone ``transformer``, the others ``model``."""
    if name == "gpt2":
        GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path / "lm")
    else:
        save_tiny(name, tmp_path / "lm")
    options = {"gradient_checkpointing": False, "trust_remote_code": False}
    model = load_value_model(str(tmp_path / "lm"), torch.float32, **options)
    torch.nn.init.normal_(model.score.weight)
    model.config.pad_token_id = 0
    saved = str(tmp_path / "rm")
    write_hf(saved, {n: p.detach() for n, p in model.named_parameters()}, model.config, model.hf_architecture)
    ids = torch.randint(2, 101, (2, 9))
    with torch.no_grad():
        values = model.eval()(ids, None, torch.arange(9).expand(2, 9))
        classifier, report = AutoModelForSequenceClassification.from_pretrained(saved, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and classifier.config.num_labels == 1
        torch.testing.assert_close(classifier.eval()(ids).logits, values[:, -1], rtol=0, atol=1e-5)
        again = load_reward_model(saved, torch.float32, **options).eval()
        torch.testing.assert_close(again(ids, None, torch.arange(9).expand(2, 9)), values, rtol=0, atol=1e-5)


def test_a_model_without_a_trained_head_is_no_reward_model(tmp_path: Path):
    path = save_tiny("llama", tmp_path)
    with pytest.raises(UserError, match=r"score\.weight"):
        load_reward_model(path, torch.float32, gradient_checkpointing=False, trust_remote_code=False)
