"""The preprocessing scripts on local copies with a few rows, and that the commands read what they write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest

from podium.utils.dataset import PromptDataset
from podium.utils.dataset_chat import ChatDataset
from podium.utils.dataset_pairs import PreferenceDataset
from tests.utils.chat_templates import CHATML, bpe_tokenizer

SCRIPTS = Path(__file__).parents[2] / "examples" / "data_preprocess"
TOKENIZER = bpe_tokenizer(CHATML)
USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "hello"), ("assistant", "no"))
)
SOURCES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "gsm8k": {
        split: [{"question": "How many?", "answer": "They are 1,000 and 2.\n#### 1,002"}] for split in ("train", "test")
    },
    "math_dataset": {
        split: [
            {"problem": "x?", "solution": r"so $\boxed{1}$, no: $\boxed{\frac{1}{2}}$."},
            {"problem": "y?", "solution": "unclear"},
        ]
        for split in ("train", "test")
    },
    "hh_rlhf": {
        split: [
            {
                "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant: so\n\nAssistant: it is",
                "rejected": "\n\nHuman: hi\n\nAssistant: no",
            },
            {"chosen": "\n\nHuman: hi", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
        ]
        for split in ("train", "test")
    },
    "ultrafeedback": {
        f"{split}_{kind}": [
            {
                "chosen": [USER, GOOD],
                "rejected": [USER, BAD],
                "messages": [USER, GOOD],
                "score_chosen": 7.5,
                "score_rejected": 6.0,
            }
        ]
        for split in ("train", "test")
        for kind in ("prefs", "sft")
    },
}


def run(script: str, tmp_path: Path, *extra: str) -> tuple[str, Path]:
    copy = tmp_path / "copy"
    splits = {name: datasets.Dataset.from_list(rows) for name, rows in SOURCES[script].items()}
    datasets.DatasetDict(splits).save_to_disk(copy)
    out = tmp_path / "out"
    argv = [sys.executable, SCRIPTS / f"{script}.py", "--out", out, "--source", copy, *extra]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert (out / "test.parquet").exists()
    return result.stdout, out / "train.parquet"


@pytest.mark.parametrize(("script", "truth"), [("gsm8k", "1002"), ("math_dataset", r"\frac{1}{2}")])
def test_tasks(tmp_path, script, truth):
    printed, file = run(script, tmp_path)
    dataset = PromptDataset(str(file), TOKENIZER, max_prompt_length=512)
    assert len(dataset) == 1 and dataset[0]["reward_model"]["ground_truth"] == truth
    assert ("1 left out" in printed) == (script == "math_dataset")


def test_preferences(tmp_path):
    printed, file = run("hh_rlhf", tmp_path)
    [row] = pq.read_table(file).to_pylist()
    assert [m["role"] for m in row["chosen"]] == ["user", "assistant"] * 2 and "1 left out" in printed
    assert row["chosen"][-1]["content"] == "so\n\nit is"
    options: dict[str, Any] = {"prompt_key": None, "max_prompt_length": 128, "max_response_length": 64}
    assert len(PreferenceDataset(str(file), TOKENIZER, **options)) == 1
    _, file = run("ultrafeedback", tmp_path / "ultra")
    assert PreferenceDataset(str(file), TOKENIZER, margin_key="margin", **options)[0]["margin"] == 1.5
    _, file = run("ultrafeedback", tmp_path / "sft", "--sft", "--limit", "1")
    assert len(ChatDataset(str(file), TOKENIZER, max_length=128)) == 1


def test_a_reasoning_gym_task(tmp_path):
    argv = [
        sys.executable,
        SCRIPTS / "reasoning_gym_task.py",
        "--out",
        tmp_path,
        "--train-size",
        "5",
        "--val-size",
        "2",
    ]
    options = ["--set", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"]
    for extra, lines in ((["--shots", "2", "--after", ": "], 3), ([], None)):
        subprocess.run([*argv, *options, *extra], check=True, timeout=120, stdout=subprocess.DEVNULL)
        rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
        assert len(rows) == 5 and rows[0]["data_source"] == "reasoning_gym/chain_sum"
        prompt = rows[0]["prompt"]
        assert (len(prompt.splitlines()) == lines) if lines else (prompt[0]["role"] == "user")
        question = prompt.splitlines()[-1] if lines else prompt[0]["content"].split(": ")[-1]
        assert eval(question.removesuffix("=")) == int(rows[0]["reward_model"]["ground_truth"])
