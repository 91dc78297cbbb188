"""Adapters under FSDP against a plain peft loop over the same model, one unpadded row at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from podium.models.lora import LoRA
from podium.protocol import WorkerGroup
from podium.trainer.config.shared import FSDPConfig
from podium.utils.errors import UserError
from tests.models.tiny import ragged_batch, tiny_model
from tests.workers.engine.hosts import small_steps, squared_error, weighted_log_probs
from tests.workers.engine.plain import Batch, plain_loss
from tests.workers.engine.test_fsdp import close, proto, run, same

LORA = LoRA(rank=3, alpha=12, seed=5)
STEPS = 3
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return [ragged_batch(8, seed=seed) for seed in range(STEPS)]


def plain_peft(name: str, lora: LoRA, start: Batch, batches: list[Batch]) -> tuple[Batch, Batch, list[float]]:
    """Adapters, merged weights and gradient norms after AdamW steps of a plain loop that starts from `start`."""
    targets = list(lora.targets) if lora.targets else "all-linear"
    peft_config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    model, config = get_peft_model(tiny_model(name), peft_config), small_steps()
    missing, surplus = model.load_state_dict({PREFIX + key: value for key, value in start.items()}, strict=False)
    assert not surplus
    trained = [p for p in model.parameters() if p.requires_grad]
    assert not [key for key in missing if "lora_" in key]
    optimizer = torch.optim.AdamW(
        trained, lr=config.lr, eps=config.eps, betas=tuple(config.betas), weight_decay=config.weight_decay
    )
    norms = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = config.lr * min(1.0, (step + 1) / 2)
        plain_loss(model, batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    adapters = {key.removeprefix(PREFIX): p.detach() for key, p in model.named_parameters() if p.requires_grad}
    return adapters, dict(model.merge_and_unload().named_parameters()), norms


def trained_of(parameters: Batch) -> Batch:
    return {name: value for name, value in parameters.items() if ".lora_" in name}


@pytest.mark.parametrize(
    ("name", "targets"),
    [("qwen2", None), ("llama_tied", ("q_proj", "layers.1.mlp.down_proj")), ("llama", ("lm_head",))],
)
def test_training_equals_a_plain_loop(
    one: WorkerGroup, two: WorkerGroup, model_dirs: dict[str, str], batches: list[Batch], name: str, targets: Any
):
    lora = LoRA(LORA.rank, LORA.alpha, targets, seed=5)
    one.build(model_dirs[name], lora=lora)
    start = one.parameters()[0]
    assert all(value.any() == (".lora_A." in key) for key, value in trained_of(start).items())
    same(one.weights()[0], dict(tiny_model(name).named_parameters()))  # B = 0: the base
    adapters, merged, norms = plain_peft(name, lora, trained_of(start), batches)
    for group, micro, options in ((one, 3, {}), (one, 8, {"checkpointing": True}), (two, 2, {})):
        weights, metrics = run(group, model_dirs[name], batches, micro, lora=lora, **options)
        parameters = group.parameters()[0]
        close(trained_of(parameters), adapters)
        close(weights, {key: p.detach() for key, p in merged.items()})
        assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=2e-4)
        same(*({k: v for k, v in each.items() if ".lora_" not in k} for each in (parameters, start)))
        states = group.optimizer_state()
        assert len(states[0][0]) == len(adapters)


def test_the_base_under_the_adapter_is_a_separate_reference(group: WorkerGroup, model_dirs, batches):
    group.build(model_dirs["qwen2"])
    reference = group.infer(proto(batches[0]), 3).batch["log_probs"]
    group.build(model_dirs["qwen2"], lora=LORA)
    same(group.infer(proto(batches[0]), 3).batch["log_probs"], reference)  # B = 0
    run(group, model_dirs["qwen2"], batches, 4, lora=LORA)
    base = group.infer_base(proto(batches[0]), 3).batch["log_probs"]
    same(base, reference)
    adapted = group.infer(proto(batches[0]), 3).batch["log_probs"]
    assert (adapted - reference).abs().max() > 1e-3, "it is on again"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_are_the_merged_export_and_the_base_never_moves(
    group: WorkerGroup, model_dirs, batches, dtype: str, tmp_path: Path
):
    fsdp = FSDPConfig(model_dtype=dtype, dtype=dtype)
    run(group, model_dirs["qwen2"], batches, 4, lora=LORA, fsdp=fsdp)
    before = group.parameters()[0]
    first, again = group.pieces(), group.pieces()
    for left, right in zip(first, again, strict=True):
        same([piece.tensor for piece in left], [piece.tensor for piece in right])
    same(group.parameters()[0], before)
    exported = group.weights(dtype)[0]
    assert exported.keys() == dict(tiny_model("qwen2").named_parameters()).keys()
    for pieces in first:
        for piece in pieces:
            box = tuple(slice(start, stop) for start, stop in zip(piece.starts, piece.stops, strict=True))
            same(piece.tensor, exported[piece.name][box])


def test_a_checkpoint_has_the_adapters_alone_and_goes_on_bit_for_bit(group: WorkerGroup, model_dirs, batches, tmp_path):
    path = model_dirs["qwen2"]
    run(group, path, batches[:2], 4, lora=LORA)
    group.save(str(tmp_path / "state"))
    group.train(proto(batches[2]), weighted_log_probs, 4)
    expected, state = group.parameters()[0], group.optimizer_state()
    group.build(path, lora=LoRA(LORA.rank, LORA.alpha, seed=99))
    group.load(str(tmp_path / "state"))
    group.train(proto(batches[2]), weighted_log_probs, 4)
    same(group.parameters()[0], expected)
    for now, before in zip(group.optimizer_state(), state, strict=True):
        same(now[0], before[0])
    names = [
        key
        for file in (tmp_path / "state").rglob("*.safetensors")
        for key in safe_open(file, "pt").keys()  # noqa: SIM118
    ]
    assert names and all(".lora_" in name for name in names)
    written = sum(file.stat().st_size for file in (tmp_path / "state").rglob("*.safetensors"))
    assert sum(group.state_bytes()) == pytest.approx(written, rel=0.3)


def test_a_checkpoint_is_refused_on_another_base(one: WorkerGroup, two: WorkerGroup, model_dirs, batches, tmp_path):
    run(two, model_dirs["llama"], batches[:1], 4, lora=LORA)
    two.save(str(tmp_path / "state"))
    expected = two.parameters()[0]
    one.build(model_dirs["llama"], lora=LORA)
    one.load(str(tmp_path / "state"))
    same(one.parameters()[0], expected)
    other = tiny_model("llama", seed=1)
    other.save_pretrained(tmp_path / "other")
    one.build(str(tmp_path / "other"), lora=LORA)
    with pytest.raises(UserError, match="adapters were trained on another base"):
        one.load(str(tmp_path / "state"))


def test_exports_load_in_transformers_and_in_peft(group: WorkerGroup, model_dirs, batches, tmp_path):
    weights, _ = run(group, model_dirs["qwen2"], batches, 4, lora=LORA)
    group.save_hf(str(tmp_path / "out"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    same(dict(merged.named_parameters()), weights)
    base = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"])
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "lora_adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == model_dirs["qwen2"]
    ids = torch.arange(10, 30)[None]
    torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=0, atol=2e-5)
    close(dict(adapted.merge_and_unload().named_parameters()), weights)


def test_a_value_head_is_trained_whole(group: WorkerGroup, model_dirs, batches, tmp_path):
    group.build(model_dirs["llama"], value=True, lora=LORA)
    start = group.parameters()[0]
    for batch in batches:
        group.train(proto(batch), squared_error, 3)
    parameters = group.parameters()[0]
    moved = {name for name, value in parameters.items() if not torch.equal(value, start[name])}
    assert moved == {name for name in parameters if ".lora_" in name or name == "score.weight"}
    group.save_hf(str(tmp_path / "out"))
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    base = AutoModelForSequenceClassification.from_pretrained(model_dirs["llama"], num_labels=1)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "lora_adapter")
    ids = torch.arange(10, 30)[None]
    torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=0, atol=2e-5)
    assert merged(input_ids=ids).logits.abs().max() > 1e-3
    assert AutoModel.from_pretrained(tmp_path / "out")
