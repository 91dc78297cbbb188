"""The quickstart's data, tokenizer and fresh model, its reward, and its check of an export."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
import make_task  # noqa: E402
import reward  # noqa: E402

SIZES = {"train": 2000, "val": 300, "sft_train": 3000, "sft_val": 200}
prompt_strategy = st.text("0123456789", min_size=6, max_size=6).map(lambda digits: digits + "=")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task.make_task(tmp_path_factory.mktemp("task"), 3, *SIZES.values())


@pytest.fixture(scope="module")
def rows(task):
    return {name: pq.read_table(task[name]).to_pylist() for name in SIZES}


def test_sizes_and_no_prompt_twice_in_all_four_files(rows):
    assert {name: len(rows[name]) for name in SIZES} == SIZES
    prompts = [row["prompt"] for name in SIZES for row in rows[name]]
    assert len(set(prompts)) == len(prompts)
    assert all(len(prompt) == 7 and prompt[:6].isdigit() and prompt[6] == "=" for prompt in prompts)


@pytest.mark.parametrize("name", ["train", "val"])
def test_rl_rows_have_verls_columns_and_the_right_answer(rows, name):
    for index, row in enumerate(rows[name]):
        assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert row["data_source"] == "podium/sort6"
        assert row["reward_model"]["style"] == "rule"
        assert row["extra_info"] == {"index": index, "split": name}
        truth = row["reward_model"]["ground_truth"]
        assert list(truth) == sorted(truth) and Counter(truth) == Counter(row["prompt"][:6])


def test_the_stated_share_of_sft_answers_is_right_and_the_rest_is_copied_or_descending(rows):
    kinds: Counter[str] = Counter()
    for row in rows["sft_train"]:
        digits, response = row["prompt"][:6], row["response"]
        right = "".join(sorted(digits))
        assert response in (right, digits, right[::-1])
        kinds["right" if response == right else "copied" if response == digits else "descending"] += 1
    assert kinds["right"] == round(make_task.RIGHT_SHARE * SIZES["sft_train"])
    assert abs(kinds["copied"] - kinds["descending"]) < 0.1 * SIZES["sft_train"]
    assert all(row["response"] == "".join(sorted(row["prompt"][:6])) for row in rows["sft_val"])


@given(prompt_strategy.filter(lambda prompt: len(set(prompt[:6])) > 1), st.integers(0, 2**32))
def test_a_wrong_answer_is_wrong(prompt, seed):
    assert make_task.wrong_answer(prompt, random.Random(seed)) != make_task.right_answer(prompt)


def test_the_same_seed_makes_the_same_files_and_another_seed_others(task, tmp_path):
    again = make_task.make_task(tmp_path / "again", 3, *SIZES.values())
    other = make_task.make_task(tmp_path / "other", 4, *SIZES.values())
    weights = "model/model.safetensors"
    for name in [f"{name}.parquet" for name in SIZES] + [weights]:
        content = (task["train"].parent / name).read_bytes()
        assert content == (again["train"].parent / name).read_bytes()
        assert content != (other["train"].parent / name).read_bytes()


def test_making_the_model_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    make_task.build_model(make_task.build_tokenizer(), seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_the_model_loads_as_any_hugging_face_model(task):
    model = AutoModelForCausalLM.from_pretrained(task["model"])
    assert model.num_parameters() == 533_120
    assert model.dtype == torch.float32
    assert model.config.head_dim == 32 and model.config.vocab_size == 64
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)


def test_the_tokenizer_is_one_token_a_character(task):
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    assert len(tokenizer) == 64 and tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0
    assert len(tokenizer("291417=").input_ids) == 7
    text = make_task.CHARACTERS
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("2A\n").input_ids[1:] == [tokenizer.unk_token_id] * 2
    padded = tokenizer(["12=", "291417="], padding=True)
    assert padded.input_ids[0][:4] == [0] * 4 and padded.attention_mask[0] == [0, 0, 0, 0, 1, 1, 1]
    assert all(tokenizer.decode([token]) for token in range(64))  # whatever the model samples is text


@given(prompt_strategy)
def test_reward_is_one_for_the_exact_answer_alone(prompt):
    truth = make_task.right_answer(prompt)
    assert reward.compute_score("podium/sort6", truth, truth) == 1.0
    for wrong in (truth + truth[-1], truth[:-1], " " + truth, ""):
        assert reward.compute_score("podium/sort6", wrong, truth, {"index": 0}) == 0.0


def check_export(*arguments):
    command = [sys.executable, QUICKSTART / "check_export.py", *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def test_check_export_prints_the_rate_and_holds_it_against_what_was_expected(task):
    right = check_export(task["model"], task["val"], "--expect", "0")  # an untrained model sorts nothing
    assert right.returncode == 0, right.stderr
    assert "greedy: 0.0000 (0 of 300)" in right.stdout
    wrong = check_export(task["model"], task["val"], "--expect", "0.98")
    assert wrong.returncode == 1 and "expected 0.9800" in wrong.stderr


def test_check_export_and_make_task_name_what_is_wrong(task, tmp_path):
    missing = check_export(tmp_path, task["val"])
    assert missing.returncode == 2 and missing.stderr == f"error: there is no file {tmp_path / 'config.json'}\n"
    assert make_task.main(["--out", str(tmp_path), "--train-size", "1000000"]) == 2
