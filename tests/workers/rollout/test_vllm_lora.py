"""vLLM with an adapter that is written in place, against plain transformers with merged weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.models.hf_layout import checkpoint_tensors
from podium.models.lora import LoRA, add_lora
from podium.utils.device import init_distributed
from podium.workers.rollout.base import Request, SamplingParams, StaleWeightsError
from tests.models.tiny import plain_logits, save_tiny, tiny_model

PROMPT, TOKENS = (5, 6, 7, 8), 8


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen2", ("k_proj", "layers.1.mlp.up_proj", "down_proj")),
        pytest.param("qwen3", None, marks=pytest.mark.slow),
    ],
)
def test_generation_multiplies_by_base_and_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, targets: Any
):
    from podium.workers.rollout.vllm import VLLMRollout

    init_distributed()
    for variable in ("RANK", "LOCAL_RANK"):  # as in a worker's process
        monkeypatch.setenv(variable, "0")
    path, lora = save_tiny(name, tmp_path / "model"), LoRA(rank=3, alpha=5, targets=targets)
    model: Any = tiny_model(name)
    base = [(key, tensor.clone()) for key, tensor in checkpoint_tensors(model)]
    adapter = add_lora(model, model, lora)
    adapter.save(tmp_path / "adapter", dict(adapter.parameters()), path)
    named = replace(lora, targets=tuple(adapter.layers))
    engine = VLLMRollout(path, dtype="float32", max_model_len=64, max_num_seqs=4, lora=named)
    engine.serve_adapter(base, str(tmp_path / "adapter"))

    assert {piece.name.rsplit(".lora_", 1)[0] for piece in engine.pieces()} == set(adapter.layers)
    request = Request("r", PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0.0))
    with pytest.raises(StaleWeightsError):
        engine.submit(request)
    for version in range(2):
        with torch.no_grad():
            for _, parameter in adapter.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)) / 8)
        engine.update_weights(version, adapter.factors())
        assert sum(piece.tensor.numel() for piece in engine.pieces()) == sum(f.numel() for _, f in adapter.factors())
        output = engine.generate([request], version)["r"]
        merged: Any = tiny_model(name)
        merged.load_state_dict(dict(adapter.merged()), strict=False)
        log_p = torch.log_softmax(plain_logits(merged, [*PROMPT, *output.token_ids])[len(PROMPT) - 1 : -1], dim=-1)
        assert output.token_ids == log_p.argmax(dim=-1).tolist()
        expected = log_p[torch.arange(TOKENS), torch.tensor(output.token_ids)]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-4)
    engine.shutdown()
