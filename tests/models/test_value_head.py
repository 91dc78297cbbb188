"""The critic's model."""

from pathlib import Path

import torch

from podium.models.hf import transformer_blocks
from podium.models.value_head import load_value_model
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
