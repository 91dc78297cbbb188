"""Supervised fine-tuning against plain transformers."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.trainer.chat import load_chat_tokenizer
from podium.trainer.config import SFTConfig, check_sft_config, load_config
from podium.trainer.main_sft import train
from podium.trainer.sft.objective import sft_objective
from podium.utils.dataset_chat import ChatDataset, PackedDataset
from podium.utils.errors import UserError
from podium.utils.torch_functional import Denominator


def test_the_objective_is_the_mean_over_response_tokens():
    log_probs = torch.tensor([[-1.0, -2.0, float("nan")], [-4.0, float("nan"), float("nan")]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    batch, denominator = {"response_mask": mask}, Denominator.from_mask(mask)
    loss, metrics = sft_objective({"log_probs": log_probs}, batch, denominator)
    assert float(loss) == float(metrics["train/loss"]) == pytest.approx(7 / 3)
    parts = [
        sft_objective({"log_probs": log_probs[i : i + 1]}, {"response_mask": mask[i : i + 1]}, denominator)[0]
        for i in (0, 1)
    ]
    assert float(sum(parts)) == pytest.approx(7 / 3)


def test_validation_is_what_transformers_computes_from_the_export(task, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, _ = load_config(SFTConfig, task.sft(tmp_path / "run"))
    validation = train(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    loss, tokens, probability = 0.0, 0, 0.0
    rows = pq.read_table(task.sft_val).to_pylist()
    for row in rows:
        prompt = tokenizer(row["prompt"], return_tensors="pt").input_ids
        answer = tokenizer(row["response"] + tokenizer.eos_token, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, answer], dim=1)).logits[0, prompt.shape[1] - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, answer[0, :, None])
        loss, tokens, probability = (
            loss - float(log_probs.sum()),
            tokens + answer.shape[1],
            probability + math.exp(log_probs.sum()),
        )
    assert validation["val/loss"] == pytest.approx(loss / tokens, rel=1e-4)
    assert validation["val/perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-3)
    assert validation["val/response_prob"] == pytest.approx(probability / len(rows), rel=1e-3, abs=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val/loss"] == validation["val/loss"] and len(lines) == 4


def test_micro_batches_and_ranks_change_nothing(task, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = []
    for name, changes in {
        "whole": {},
        "cut": {"data__micro_batch_size_per_gpu": 5},
        "ranks": {"trainer__n_gpus_per_node": 2, "data__micro_batch_size_per_gpu": 7},
    }.items():
        config, _ = load_config(SFTConfig, task.sft(tmp_path / name, **changes))
        train(config)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        results.append([json.loads(line)["train/loss"] for line in lines])
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    assert results[2] == pytest.approx(results[0], rel=1e-4)


def test_the_seed_draws_the_adapters(task, tmp_path, monkeypatch):
    """Their B is 0, so that the first loss is the base's; its gradient depends on A."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first = {}
    for name, changes in {"a": {}, "b": {"trainer__seed": 1}, "again": {"trainer__seed": 0}}.items():
        changes |= {"model__lora_rank": 2, "trainer__total_training_steps": 1, "data__val_files": None}
        config, explicit = load_config(SFTConfig, task.sft(tmp_path / name, **changes))
        check_sft_config(config, explicit)
        train(config)
        first[name] = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
    assert first["a"]["train/loss"] == first["b"]["train/loss"]
    assert first["a"]["train/grad_norm"] == first["again"]["train/grad_norm"] != first["b"]["train/grad_norm"]


def chats(path, count):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number:0{1 + number % 9}d}+1="},
                {"role": "assistant", "content": str(number + 1)},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": "no " * (number % 5)},
            ]
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}|"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return file


def test_packed_documents_do_not_see_each_other(task, template, tmp_path, monkeypatch):
    """One step on all conversations: loss and weights are those of the same conversations, one a row."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data = chats(tmp_path / "chats.parquet", 24)
    results = {}
    common = {
        "data__train_files": data,
        "data__val_files": data,
        "data__messages_key": "messages",
        "data__chat_template": template,
        "data__max_length": 128,
        "data__max_prompt_length": None,
        "data__max_response_length": None,
        "optim__eps": 1e-3,  # Adam's first step would blow rounding up
    }
    for name, changes in {"rows": {}, "packed": {"data__packing": "true", "data__micro_batch_size_per_gpu": 5}}.items():
        argv = task.sft(tmp_path / name, **common | changes | {"data__train_batch_size": 1})
        config, explicit = load_config(SFTConfig, argv)
        check_sft_config(config, explicit)
        rows = _rows(config)
        config.data.train_batch_size = rows
        validation = train(config)
        line = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        results[name] = [line["train/loss"], line["train/grad_norm"], *validation.values()]
        assert AutoTokenizer.from_pretrained(tmp_path / name / "export").chat_template == template.read_text()
        assert (rows == 24) == (name == "rows") and rows > 5
    assert results["packed"] == pytest.approx(results["rows"], rel=1e-4)


def _rows(config) -> int:
    tokenizer = load_chat_tokenizer(config.model.path, config.data, False, "model.path")
    dataset = ChatDataset(config.data.train_files, tokenizer, max_length=128)
    return len(PackedDataset(dataset, tokenizer.pad_token_id, 128)) if config.data.packing else len(dataset)


def test_keys_of_the_other_form_are_refused(task, tmp_path):
    for change, message in (
        ({"data__messages_key": "messages"}, r"data.max_prompt_length has no effect beside data.messages_key"),
        ({"data__max_length": 9}, r"data.max_length has no effect without data.messages_key"),
        ({"data__packing": "true", "strategy": "megatron"}, r"data.packing=true with strategy=megatron"),
    ):
        with pytest.raises(UserError, match=message):
            check_sft_config(*load_config(SFTConfig, task.sft(tmp_path, **change)))
