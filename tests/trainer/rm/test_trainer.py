"""Reward-model training against plain transformers."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from podium.trainer.config import RMConfig, check_rm_config, load_config
from podium.trainer.main_rm import train
from podium.trainer.rm.objective import preference_objective
from podium.utils.errors import UserError
from podium.utils.torch_functional import Denominator


def pairs(count: int, start: int) -> list[dict[str, str]]:
    """A digit is better than a letter."""
    return [
        {"prompt": f"{number:06d}=", "chosen": f"{number % 1000:03d}", "rejected": "abc"[number % 3] * 4}
        for number in range(start, start + count)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    files = {"train": pairs(128, 0), "val": pairs(20, 5000)}
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return {name: folder / f"{name}.parquet" for name in files}


def rm(task, data, run_dir: Path, **changes) -> RMConfig:
    keys = {
        "data.train_files": data["train"],
        "data.val_files": data["val"],
        "data.train_batch_size": 16,
        "data.max_prompt_length": 7,
        "data.max_response_length": 7,
        "model.path": task.model,
        "optim.lr": 2e-3,
        "trainer.backend": "local",
        "trainer.device": "cpu",
        "trainer.default_local_dir": run_dir,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    config, explicit = load_config(RMConfig, [f"{key}={value}" for key, value in keys.items()])
    check_rm_config(config, explicit)
    return config


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_objective_is_bradley_terry_whatever_the_cut():
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 1, 2, 4])
    mask = torch.arange(4) < lengths[:, None]
    scores = torch.where(mask, torch.randn(4, 4, generator=g), torch.nan).requires_grad_()
    last = scores[torch.arange(4), lengths - 1]
    margins = torch.tensor([0.5, 0.5, 0.0, 0.0])
    denominator = Denominator.from_mask(mask)
    batch = {"response_mask": mask, "margins": margins}
    loss, metrics = preference_objective({"scores": scores}, batch, denominator)
    gap = (last[0::2] - last[1::2]).detach()
    assert float(loss.detach()) == pytest.approx(float(torch.log1p(torch.exp(-(gap - margins[0::2]))).mean()), rel=1e-6)
    assert float(metrics["train/accuracy"]) == float((gap > 0).float().mean())
    parts = [
        preference_objective(
            {"scores": scores[rows]}, {name: value[rows] for name, value in batch.items()}, denominator
        )[0]
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert float(sum(part.detach() for part in parts)) == pytest.approx(float(loss.detach()), rel=1e-6)
    loss.backward()
    assert not scores.grad.isnan().any(), "padding reaches the gradient"
    assert (scores.grad != 0).sum() == 4


@pytest.mark.parametrize("changes", [{}, {"model__lora_rank": 4, "optim__lr": 1e-2}], ids=["whole", "lora"])
def test_it_learns_and_transformers_reads_the_same_scores_from_the_export(task, data, tmp_path, monkeypatch, changes):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = tmp_path / "run"
    validation = train(rm(task, data, run_dir, trainer__total_epochs=4, **changes))
    steps = lines(run_dir)
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-5), "scores start at 0"
    assert validation["val/accuracy"] == steps[-1]["val/accuracy"] == 1.0 and validation["val/loss"] < 0.1

    model = AutoModelForSequenceClassification.from_pretrained(run_dir / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    means = {}
    rows = pq.read_table(data["val"]).to_pylist()
    for side in ("chosen", "rejected"):
        texts = [row["prompt"] + row[side] + tokenizer.eos_token for row in rows]
        inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            means[side] = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits[:, 0].mean()
    for side, mean in means.items():
        assert validation[f"val/score_{side}"] == pytest.approx(float(mean), rel=1e-4)


MEGATRON = {"strategy": "megatron", "trainer__n_gpus_per_node": 2, "data__micro_batch_size_per_gpu": 3}


@pytest.mark.slow
def test_micro_batches_ranks_and_engines_change_nothing(task, data, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = []
    for name, changes in {
        "whole": {},
        "cut": {"data__micro_batch_size_per_gpu": 3},
        "ranks": {"trainer__n_gpus_per_node": 2, "data__micro_batch_size_per_gpu": 5},
        "tp2": {**MEGATRON, "megatron__tensor_model_parallel_size": 2},
        "pp2": {**MEGATRON, "megatron__pipeline_model_parallel_size": 2, "megatron__use_remove_padding": "true"},
    }.items():
        validation = train(rm(task, data, tmp_path / name, **changes))
        results.append([*(line["train/loss"] for line in lines(tmp_path / name)), *validation.values()])
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-4, abs=1e-5)


def test_padding_never_is_the_end_of_a_text(task, data, tmp_path, monkeypatch):
    """With padding and end-of-sequence one token, transformers would read the score one token too early."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.pad_token = None
    model = tmp_path / "model"
    AutoModelForSequenceClassification.from_pretrained(task.model, num_labels=1).save_pretrained(model)
    tokenizer.save_pretrained(model)
    train(rm(task, data, tmp_path / "run", model__path=model, trainer__total_training_steps=1))
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    assert exported.pad_token == exported.unk_token != exported.eos_token
    tokenizer.unk_token = None
    tokenizer.save_pretrained(model)
    with pytest.raises(UserError, match="pads with its end-of-sequence token"):
        train(rm(task, data, tmp_path / "run", model__path=model))
