"""The FSDP2 engine against a plain AdamW loop over the same Hugging Face model, one unpadded row at a time."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from podium.protocol import DataProto, WorkerError, WorkerGroup
from podium.trainer.config.shared import FSDPConfig
from podium.trainer.config.training import ActorConfig, CriticConfig
from podium.trainer.ppo.objectives import PolicyObjective, ValueObjective
from tests.models.tiny import ARCHITECTURES, ragged_batch, row_tokens, tiny_model
from tests.workers.engine.hosts import (
    fails_on_second,
    infinite_constant,
    small_steps,
    squared_error,
    weighted_log_probs,
)
from tests.workers.engine.plain import Batch, plain_training


def proto(batch: Batch) -> DataProto:
    return DataProto.from_dict(dict(batch))


def close(left: Batch, right: Batch, atol: float = 2e-6) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def run(
    group: WorkerGroup, path: str, batches: list[Batch], micro: int, loss_fn: Any = weighted_log_probs, **options: Any
):
    """Weights on rank 0 and metrics of each step, after training a new engine on the batches."""
    group.build(path, **options)
    metrics = [group.train(proto(batch), loss_fn, micro) for batch in batches]
    for step in metrics:
        assert all(rank == step[0] for rank in step), "ranks disagree on the metrics"
    return group.weights()[0], [step[0] for step in metrics]


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return [ragged_batch(8, seed=seed) for seed in range(4)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_equals_a_plain_loop(group: WorkerGroup, model_dirs: dict[str, str], batches: list[Batch], name: str):
    expected, expected_metrics = plain_training(name, batches, grad_clip=1.0)
    weights, metrics = run(group, model_dirs[name], batches, micro=3)
    close(weights, expected)
    assert expected_metrics[0]["grad_norm"] > 1.0, "clipping is part of what is tested"
    for step, plain in zip(metrics, expected_metrics, strict=True):
        assert {k: step[k] for k in plain} == pytest.approx(plain, rel=2e-4)


def test_a_max_metric_is_the_largest_of_all_micro_batches_and_ranks(group: WorkerGroup, model_dirs, batches):
    group.build(model_dirs["llama"])
    batch = batches[0]
    log_probs = group.infer(proto(batch), 8).batch["log_probs"]
    metrics = group.train(proto(batch), weighted_log_probs, 2)[0]
    assert metrics["log_prob_max"] == pytest.approx(float(log_probs[batch["response_mask"]].max()), abs=1e-5)


def widened(batch: Batch, left: int, right: int) -> Batch:
    """The same rows between more padding columns."""
    wide = {}
    for name, value in batch.items():
        prompt_side = left if name in ("input_ids", "attention_mask", "position_ids") else 0
        wide[name] = torch.nn.functional.pad(value, (prompt_side, right))
    return wide


def test_the_result_does_not_depend_on_how_the_batch_is_laid_out(
    one: WorkerGroup, two: WorkerGroup, model_dirs, batches
):
    path = model_dirs["qwen2"]
    expected, expected_metrics = run(one, path, batches, micro=8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    shuffled = [{k: v[order] for k, v in batch.items()} for batch in batches]
    variants = {
        "micro 1": (one, batches, 1),
        "micro 5": (one, batches, 5),
        "wider": (one, [widened(batch, 3, 4) for batch in batches], 8),
        "shuffled": (one, shuffled, 3),
        "two ranks, micro 1": (two, batches, 1),
        "two ranks, micro 4": (two, [widened(batch, 0, 2) for batch in shuffled], 4),
    }
    for name, (group, laid_out, micro) in variants.items():
        weights, metrics = run(group, path, laid_out, micro)
        close(weights, expected)
        for step, whole in zip(metrics, expected_metrics, strict=True):
            assert step == pytest.approx(whole, rel=2e-4, abs=1e-6), name


def test_rows_without_valid_tokens_change_nothing(group: WorkerGroup, model_dirs, batches):
    """Whole micro-batches of them too, on one rank or on both, with NaN in what the loss reads."""
    loss_fn = PolicyObjective.from_config(ActorConfig(entropy_coeff=0.01))
    padded = []
    for batch in batches:
        double = {name: torch.cat([value, value]) for name, value in batch.items()}
        double["response_mask"][8:] = False
        double["advantages"][8:] = torch.nan
        g = torch.Generator().manual_seed(len(padded))
        order = torch.arange(16) if len(padded) % 2 else torch.randperm(16, generator=g)
        padded.append({name: value[order] for name, value in double.items()})
    expected, expected_metrics = run(group, model_dirs["llama"], batches, 2, loss_fn)
    weights, metrics = run(group, model_dirs["llama"], padded, 2, loss_fn)
    close(weights, expected)
    for step, without in zip(metrics, expected_metrics, strict=True):
        spread = {name for name in step if name.endswith("all_masked_micro_batches")}
        assert {k: v for k, v in step.items() if k not in spread} == pytest.approx(
            {k: v for k, v in without.items() if k not in spread}, rel=2e-4, abs=1e-6
        )


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_nan_in_masked_columns_changes_nothing(one: WorkerGroup, model_dirs, batches, role: str):
    if role == "actor":
        config = ActorConfig(use_kl_loss=True, entropy_coeff=0.01)
        loss_fn: Any = PolicyObjective.from_config(config)
    else:
        loss_fn = ValueObjective(CriticConfig())
    clean, poisoned = [], []
    for batch in batches:
        batch = {**batch, "ref_log_prob": batch["old_log_probs"] - 0.1}
        inputs = ("old_log_probs", "ref_log_prob", "advantages", "returns", "values")
        nans = {name: torch.where(batch["response_mask"], batch[name], torch.nan) for name in inputs}
        clean.append(batch)
        poisoned.append({**batch, **nans})
    options: dict[str, Any] = {"micro": 3, "loss_fn": loss_fn, "value": role == "critic"}
    expected, expected_metrics = run(one, model_dirs["llama"], clean, **options)
    weights, metrics = run(one, model_dirs["llama"], poisoned, **options)
    same(weights, expected)
    assert metrics == expected_metrics


def test_padding_tokens_are_never_looked_at(one: WorkerGroup, model_dirs, batches):
    expected, _ = run(one, model_dirs["llama"], batches, micro=4)
    garbage = []
    for batch in batches:
        ids = torch.where(batch["attention_mask"], batch["input_ids"], 77)
        responses = torch.where(batch["response_mask"], batch["responses"], 55)
        garbage.append({**batch, "input_ids": ids, "responses": responses})
    weights, _ = run(one, model_dirs["llama"], garbage, micro=4)
    same(weights, expected)


def snapshot(group: WorkerGroup) -> list[Any]:
    return [group.weights(), group.optimizer_state()]


@pytest.mark.parametrize("loss_fn", [weighted_log_probs, infinite_constant])
def test_a_non_finite_step_touches_nothing(group: WorkerGroup, model_dirs, batches, loss_fn):
    group.build(model_dirs["llama"])
    group.train(proto(batches[0]), weighted_log_probs, 2)
    before = snapshot(group)
    bad = {**batches[1], "advantages": batches[1]["advantages"].clone()}
    if loss_fn is weighted_log_probs:
        bad["advantages"][7, 0] = torch.inf  # on the last rank only
    answers = group.train(proto(bad), loss_fn, 2)
    assert len(answers) == group.world_size
    assert all(isinstance(a, str) and "no update was made" in a for a in answers), answers
    same(snapshot(group), before)
    group.train(proto(batches[2]), weighted_log_probs, 2)
    after = group.weights()[0]
    expected, _ = run(group, model_dirs["llama"], [batches[0], batches[2]], micro=2)
    same(after, expected)


def test_a_loss_that_raises_leaves_no_gradient_behind(one: WorkerGroup, model_dirs, batches):
    one.build(model_dirs["llama"])
    marked = {**batches[0], "advantages": batches[0]["advantages"].clone()}
    marked["advantages"][7] = 1000.0
    with pytest.raises(WorkerError, match="marked"):
        one.train(proto(marked), fails_on_second, 2)
    one.train(proto(batches[1]), weighted_log_probs, 2)
    after = one.weights()[0]
    expected, _ = run(one, model_dirs["llama"], [batches[1]], micro=2)
    same(after, expected)


def test_resuming_goes_on_exactly(group: WorkerGroup, model_dirs, batches, tmp_path: Path):
    options = {"optim": small_steps(lr_scheduler_type="cosine", min_lr_ratio=0.1), "total_steps": 6}
    run(group, model_dirs["qwen3"], batches[:2], 3, **options)
    group.save(str(tmp_path / "saved"))
    saved = snapshot(group)
    expected_metrics = [group.train(proto(batch), weighted_log_probs, 3)[0] for batch in batches[2:]]
    expected = snapshot(group)
    group.build(model_dirs["qwen3"], **options)
    group.load(str(tmp_path / "saved"))
    same(snapshot(group), saved)
    metrics = [group.train(proto(batch), weighted_log_probs, 3)[0] for batch in batches[2:]]
    assert metrics == expected_metrics
    same(snapshot(group), expected)


@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_what_two_ranks_saved_one_loads(
    one: WorkerGroup, two: WorkerGroup, model_dirs, batches, tmp_path: Path, name: str
):
    run(two, model_dirs[name], batches[:2], 3)
    two.save(str(tmp_path))
    one.build(model_dirs[name])
    one.load(str(tmp_path))
    same(one.weights()[0], two.weights()[0])
    [whole, lrs, schedule] = one.optimizer_state()[0]
    shards = two.optimizer_state()
    assert all(shard[1:] == [lrs, schedule] for shard in shards)
    for parameter, *parts in zip(whole, *(shard[0] for shard in shards), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            same(parameter[key], torch.cat([part[key] for part in parts])[: len(parameter[key])])
        same(parameter["step"], parts[0]["step"])
    metrics = [group.train(proto(batches[2]), weighted_log_probs, 3)[0] for group in (one, two)]
    assert metrics[0] == pytest.approx(metrics[1], rel=2e-4)
    close(one.weights()[0], two.weights()[0])


def test_saving_before_the_first_step_changes_nothing(one: WorkerGroup, model_dirs, batches, tmp_path: Path):
    expected, _ = run(one, model_dirs["llama"], batches, micro=4)
    one.build(model_dirs["llama"])
    one.save(str(tmp_path))
    for batch in batches:
        one.train(proto(batch), weighted_log_probs, 4)
    same(one.weights()[0], expected)
    one.build(model_dirs["llama"])
    one.load(str(tmp_path))
    for batch in batches:
        one.train(proto(batch), weighted_log_probs, 4)
    same(one.weights()[0], expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_save_hf_loads_as_an_ordinary_model(group: WorkerGroup, model_dirs, batches, tmp_path: Path, name: str):
    weights, _ = run(group, model_dirs[name], batches[:1], 4)
    group.save_hf(str(tmp_path))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is type(tiny_model(name)) and loaded.dtype == torch.float32
    same(dict(loaded.named_parameters()), weights)
    tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert tied == loaded.config.tie_word_embeddings == (name in ("llama_tied", "qwen3"))
    original = AutoModelForCausalLM.from_pretrained(model_dirs[name])
    assert loaded.config.to_diff_dict() == original.config.to_diff_dict()
    assert loaded.generation_config.to_dict() == original.generation_config.to_dict()


def test_save_hf_of_a_value_model(group: WorkerGroup, model_dirs, batches, tmp_path: Path):
    weights, _ = run(group, model_dirs["qwen2"], batches[:2], 4, squared_error, value=True)
    values = group.infer(proto(batches[2]), 4).batch["values"]
    group.save_hf(str(tmp_path))
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.config.num_labels == 1
    same(dict(loaded.named_parameters()), weights)
    prompt, response = row_tokens(batches[2], 0)
    with torch.no_grad():
        hidden = loaded.model(torch.tensor([prompt + response])).last_hidden_state
        expected = loaded.score(hidden)[0, len(prompt) - 1 : -1, 0]
    torch.testing.assert_close(values[0, : len(response)], expected, rtol=0, atol=1e-5)
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize("value", [False, True])
def test_gradient_checkpointing_gives_the_same_gradient(one: WorkerGroup, model_dirs, batches, value: bool):
    loss_fn = squared_error if value else weighted_log_probs
    expected, expected_metrics = run(one, model_dirs["qwen3"], batches, 4, loss_fn, value=value)
    weights, metrics = run(one, model_dirs["qwen3"], batches, 4, loss_fn, value=value, checkpointing=True)
    close(weights, expected, atol=1e-6)
    assert metrics[0] == pytest.approx(expected_metrics[0], rel=1e-5)
    blocks = [m for m in one._transport._host.context.roles["EngineHost"].engine._module.modules() if hasattr(m, "mlp")]
    assert all(block.gradient_checkpointing for block in blocks)


def test_bf16_is_near_fp32_and_masters_stay_fp32(group: WorkerGroup, model_dirs, batches):
    _, expected = run(group, model_dirs["llama"], batches, 4)
    weights, metrics = run(group, model_dirs["llama"], batches, 4, fsdp=FSDPConfig(dtype="bfloat16"))
    for step, full in zip(metrics, expected, strict=True):
        assert 1e-4 < abs(step["loss"] - full["loss"]) < 0.05
        assert step["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.05)
    assert any((w != w.bfloat16().float()).any() for w in weights.values())


@pytest.mark.parametrize("reshard", [True, False])
def test_export_gives_master_weights_also_after_a_forward(
    group: WorkerGroup, model_dirs, batches, tmp_path: Path, reshard
):
    fsdp = FSDPConfig(dtype="bfloat16", reshard_after_forward=reshard)
    group.build(model_dirs["llama_tied"], fsdp=fsdp)
    expected = {name: p.detach() for name, p in tiny_model("llama_tied").named_parameters()}
    group.infer(proto(batches[0]), 4)
    for weights in group.weights():
        same(weights, expected)
    group.infer(proto(batches[0]), 4)
    group.save_hf(str(tmp_path))
    same(dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters()), expected)
    _, metrics = run(group, model_dirs["llama_tied"], batches, 4, fsdp=dataclasses.replace(fsdp, dtype="float32"))
    _, plain = plain_training("llama_tied", batches, grad_clip=1.0)
    assert metrics[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=2e-4)


def test_dropout_is_off(one: WorkerGroup, model_dirs, batches, tmp_path: Path):
    tiny_model("llama", attention_dropout=0.5).save_pretrained(tmp_path)
    expected, _ = run(one, model_dirs["llama"], batches[:2], 4)
    weights, _ = run(one, str(tmp_path), batches[:2], 4)
    same(weights, expected)
