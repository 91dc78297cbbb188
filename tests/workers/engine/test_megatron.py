"""What the Megatron engine does beside computing in every layout (test_megatron_layouts.py)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from podium.models.value_head import load_value_model
from podium.protocol import WorkerGroup
from podium.trainer.config.training import ActorConfig
from podium.trainer.ppo.objectives import PolicyObjective
from podium.utils.torch_functional import Denominator
from podium.workers.engine.forward import forward_values
from podium.workers.engine.optim import build_optimizer
from podium.workers.engine.spec import Values
from tests.models.tiny import tiny_model
from tests.workers.engine.hosts import infinite_constant, small_steps, squared_error, weighted_log_probs
from tests.workers.engine.megatron_cases import LAYERS, Start, build, close, proto, same
from tests.workers.engine.plain import Batch, plain_outputs, plain_training


def test_interleaved_stages_take_any_number_of_micro_batches(start: Start, paths, batches: list[Batch]):
    """8 rows in micro-batches of 3 or 8 leave stages without work in the last group."""
    expected, expected_metrics = plain_training("qwen2", batches[:1], grad_clip=1.0, num_hidden_layers=LAYERS)
    for micro in (3, 8):
        group = build(start, "pp2 vpp2", paths["qwen2"])
        metrics = group.train(proto(batches[0]), weighted_log_probs, micro)[0]
        assert {k: metrics[k] for k in expected_metrics[0]} == pytest.approx(expected_metrics[0], rel=2e-4)
        close(group.weights()[0], expected, 2e-6)


@pytest.mark.parametrize("text", ["pp2 vpp2", pytest.param("tp2 dp2", marks=pytest.mark.slow)])
def test_rows_without_valid_tokens_change_nothing(start: Start, paths, batches: list[Batch], text: str):
    """Whole micro-batches of them, too, with NaN in what the loss reads."""
    loss_fn = PolicyObjective.from_config(ActorConfig(entropy_coeff=0.01))
    double = {name: torch.cat([value, value]) for name, value in batches[0].items()}
    double["response_mask"][8:] = False
    double["advantages"][8:] = torch.nan
    results = []
    for batch in (batches[0], double):
        group = build(start, text, paths["llama"])
        metrics = group.train(proto(batch), loss_fn, 2)[0]
        results.append((group.weights()[0], {k: v for k, v in metrics.items() if "all_masked" not in k}))
    close(results[1][0], results[0][0], 2e-6)
    assert results[1][1] == pytest.approx(results[0][1], rel=2e-4, abs=1e-6)


def snapshot(group: WorkerGroup) -> list[Any]:
    return [group.weights(), group.optimizer_state()]


@pytest.mark.parametrize("text", ["pp2 vpp2", "tp2", pytest.param("tp2 dp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_fn", [weighted_log_probs, infinite_constant])
def test_a_non_finite_step_touches_nothing(start: Start, paths, batches: list[Batch], text: str, loss_fn):
    group = build(start, text, paths["llama"])
    group.train(proto(batches[0]), weighted_log_probs, 2)
    before = snapshot(group)
    bad = {**batches[1], "advantages": batches[1]["advantages"].clone()}
    if loss_fn is weighted_log_probs:
        bad["advantages"][7, 0] = torch.inf
    answers = group.train(proto(bad), loss_fn, 2)
    assert all(isinstance(a, str) and "no update was made" in a for a in answers), answers
    same(snapshot(group), before)
    group.train(proto(batches[2]), weighted_log_probs, 2)
    after = group.weights()[0]
    group = build(start, text, paths["llama"])
    for batch in (batches[0], batches[2]):
        group.train(proto(batch), weighted_log_probs, 2)
    same(group.weights()[0], after)


RESHAPED = [
    ("pp2 vpp2", "tp2"),
    pytest.param("tp2", "pp2 vpp2", marks=pytest.mark.slow),
    pytest.param("tp2 dp2", "pp2 uneven", marks=pytest.mark.slow),
    pytest.param("tp2 pp2", "dp2", marks=pytest.mark.slow),
    pytest.param("pp2 dp2", "cp2", marks=pytest.mark.slow),
]
"""One after another in the same processes: nothing of an earlier layout reaches a later one's checkpoint."""


@pytest.mark.parametrize(("text", "other"), RESHAPED)
def test_another_layout_goes_on_from_a_checkpoint(
    start: Start, paths, batches: list[Batch], tmp_path: Path, text: str, other: str
):
    options = {"optim": small_steps(lr_scheduler_type="cosine", min_lr_ratio=0.1), "total_steps": 6}
    for name in ("qwen2", "llama_tied"):
        group = build(start, text, paths[name], **options)
        for batch in batches[:2]:
            group.train(proto(batch), weighted_log_probs, 3)
        path = str(tmp_path / name)
        group.save(path)
        saved, state = group.weights()[0], group.optimizer_state()
        metrics = group.train(proto(batches[2]), weighted_log_probs, 3)[0]
        expected = group.weights()[0]

        group = build(start, text, paths[name], **options)
        group.load(path)
        same(group.weights()[0], saved)
        same(group.optimizer_state(), state)
        assert group.train(proto(batches[2]), weighted_log_probs, 3)[0] == metrics
        same(group.weights()[0], expected)

        group = build(start, other, paths[name], **options)
        group.load(path)
        same(group.weights()[0], saved)
        assert group.train(proto(batches[2]), weighted_log_probs, 3)[0] == pytest.approx(metrics, rel=2e-4)
        close(group.weights()[0], expected, 2e-6)


def test_saving_before_the_first_step_changes_nothing(start: Start, paths, batches: list[Batch], tmp_path: Path):
    expected, _ = plain_training("llama", batches, grad_clip=1.0, num_hidden_layers=LAYERS)
    group = build(start, "tp2", paths["llama"])
    group.save(str(tmp_path))
    group = build(start, "pp2", paths["llama"])
    group.load(str(tmp_path))
    for batch in batches:
        group.train(proto(batch), weighted_log_probs, 4)
    close(group.weights()[0], expected, 2e-6)


@pytest.mark.parametrize("text", ["pp2 vpp2", *(pytest.param(t, marks=pytest.mark.slow) for t in ("tp2", "dp2 bf16"))])
def test_training_keeps_parameters_in_flat_memory_where_the_weight_sync_reads_them(
    start: Start, paths, batches: list[Batch], text: str
):
    """One buffer for each chunk of a stage, the same in all steps. In float32 the optimizer updates it in place."""
    group = build(start, text, paths["llama_tied"])
    before, weights = group.flat_memory(), group.weights()[0]
    for batch in batches[:2]:
        group.train(proto(batch), weighted_log_probs, 3)
    assert group.flat_memory() == before
    for rank in before:
        for chunk in rank:
            assert len(chunk["parameters"]) == 1 and chunk["aligned"]
            assert chunk["parameters"] == chunk["buffers"] == chunk["sync"]
            assert chunk["gradients"] == chunk["gradient buffers"] and len(chunk["gradients"]) == 1
            assert ("bf16" in text) == (not chunk["optimizer"])
    assert all((tensor != weights[name]).any() for name, tensor in group.weights()[0].items())


@pytest.mark.parametrize("text", ["tp2", pytest.param("pp2 vpp2", marks=pytest.mark.slow)])
def test_a_value_model(start: Start, paths, batches: list[Batch], tmp_path: Path, text: str):
    """Training, values, and the directory that transformers loads, against the FSDP engine's module."""
    model = load_value_model(paths["qwen2"], torch.float32, gradient_checkpointing=False, trust_remote_code=False)
    optimizer = build_optimizer(model.named_parameters(), small_steps(lr_warmup_steps=0))
    group = build(start, text, paths["qwen2"], outputs=Values(), optim=small_steps(lr_warmup_steps=0))
    for batch in batches[:2]:
        loss, _ = squared_error(forward_values(model, batch), batch, Denominator.from_mask(batch["response_mask"]))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = group.train(proto(batch), squared_error, 3)[0]
        assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx((loss.item(), norm.item()), rel=2e-4)
    with torch.no_grad():
        expected = torch.where(batches[2]["response_mask"], forward_values(model, batches[2])["values"], 0.0)
    values = group.infer(proto(batches[2]), 3).batch["values"]
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)
    assert expected.abs().max() > 1e-3
    group.save_hf(str(tmp_path))
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and loaded.config.num_labels == 1
    close(
        {n: p.detach() for n, p in loaded.named_parameters()},
        {n: p.detach() for n, p in model.named_parameters()},
        2e-6,
    )


@pytest.mark.parametrize("name", ["qwen2", "llama_tied"])
def test_save_hf_loads_as_an_ordinary_model(start: Start, paths, tmp_path: Path, name: str):
    build(start, "pp2", paths[name]).save_hf(str(tmp_path))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    original = AutoModelForCausalLM.from_pretrained(paths[name])
    same(dict(loaded.named_parameters()), dict(original.named_parameters()))
    assert loaded.config.to_diff_dict() == original.config.to_diff_dict()
    assert loaded.generation_config.to_dict() == original.generation_config.to_dict()


@pytest.mark.parametrize("text", ["tp2 sp", "pp2 vpp2"])
def test_recomputing_gives_the_same_gradient(start: Start, paths, batches: list[Batch], text: str):
    expected, _ = plain_training("qwen3", batches, grad_clip=1.0, num_hidden_layers=LAYERS)
    group = build(start, text, paths["qwen3"], recompute=True)
    for batch in batches:
        group.train(proto(batch), weighted_log_probs, 4)
    close(group.weights()[0], expected, 2e-6)


def test_bfloat16_keeps_master_weights_in_float32(start: Start, paths, batches: list[Batch]):
    """Steps far below bfloat16's resolution add up."""
    steps = small_steps(lr=1e-5, lr_warmup_steps=0, weight_decay=0.0, eps=1e-8)
    group = build(start, "tp2 bf16", paths["llama"], optim=steps)
    before = group.optimizer_state()
    for _ in range(4):
        metrics = group.train(proto(batches[0]), weighted_log_probs, 4)[0]
    assert metrics["grad_norm"] > 1.0
    for rank, earlier in zip(group.optimizer_state(), before, strict=True):
        for master, old in zip(rank[1], earlier[1], strict=True):
            assert master.dtype == torch.float32
            moved = (master - old).abs()
            assert moved.max() < 5e-5 and moved[moved > 0].median() > 2e-5
    outputs = group.infer(proto(batches[0]), 4).batch
    expected = plain_outputs(tiny_model("llama", num_hidden_layers=LAYERS), batches[0])
    difference = (outputs["log_probs"] - expected["log_probs"]).abs()
    assert difference.max() < 0.5 and difference.mean() < 0.05
