"""The pipeline's preferences: what is turned down is wrong, and comes in both kinds."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FILE = Path(__file__).parents[2] / "examples" / "rlhf" / "make_pairs.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("rlhf_make_pairs", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_near_misses_are_wrong_and_sorted_where_they_should_be(script):
    rng = random.Random(0)
    for right in ("112479", "000001", "555567"):
        for in_order in (True, False):
            misses = [script.near_miss(right, in_order, rng) for _ in range(200)]
            assert right not in misses and all(5 <= len(miss) <= 7 for miss in misses)
            if in_order:
                assert all(list(miss) == sorted(miss) for miss in misses)


def test_pairs_prefer_the_right_answer_and_share_no_prompt(script, tmp_path):
    rows = [
        {
            "prompt": f"{number:06d}=",
            "reward_model": {"ground_truth": "".join(sorted(f"{number:06d}"))},
            "responses": [f"{number:06d}", "".join(sorted(f"{number:06d}"))],
        }
        for number in range(120340, 120440)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "samples.parquet")
    assert script.main([str(tmp_path / "samples.parquet"), "--out", str(tmp_path), "--val-prompts", "20"]) == 0
    parts = {name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "val")}
    prompts = {name: {row["prompt"] for row in pairs} for name, pairs in parts.items()}
    assert not prompts["train"] & prompts["val"] and len(prompts["val"]) == 20
    for row in parts["train"] + parts["val"]:
        assert row["chosen"] == "".join(sorted(row["prompt"][:6])) != row["rejected"]
    assert script.main([str(tmp_path / "samples.parquet"), "--out", str(tmp_path), "--val-prompts", "100"]) == 2
