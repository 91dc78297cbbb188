"""main_generate on a real engine: what it writes, and that a killed run loses and repeats nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from podium.trainer.config import GenerateConfig, check_generate_config, load_config
from podium.trainer.main_generate import generate_file
from podium.utils.errors import UserError

ROOT = Path(__file__).parents[3]


def arguments(task, output: Path, **changes) -> list[str]:
    keys = {
        "data.path": task.val,
        "data.output_path": output,
        "data.max_prompt_length": 7,
        "data.max_response_length": 7,
        "data.batch_size": 4,
        "model.path": task.model,
        "rollout.name": "hf",
        "rollout.n": 3,
        "trainer.backend": "local",
        "trainer.device": "cpu",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def run(task, output: Path, **changes) -> list[dict]:
    config, explicit = load_config(GenerateConfig, arguments(task, output, **changes))
    check_generate_config(config, explicit)
    return pq.read_table(generate_file(config)).to_pylist()


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> list[dict]:
    """The rows of a run that nothing disturbed."""
    return run(task, tmp_path_factory.mktemp("whole") / "out.parquet")


def test_the_rows_of_the_input_with_their_responses(task, whole, tmp_path, capsys):
    rows = pq.read_table(task.val).to_pylist()
    assert [{name: row[name] for name in rows[0]} for row in whole] == rows
    assert all(len(row["responses"]) == len(row["finished"]) == 3 for row in whole)
    assert len({text for row in whole for text in row["responses"]}) > len(rows), "samples differ"
    assert all(len(text) <= 7 for row in whole for text in row["responses"])
    output = tmp_path / "deep" / "out.parquet"
    assert run(task, output) == whole, "one seed, one result"
    capsys.readouterr()
    assert run(task, output) == whole and "is complete already" in capsys.readouterr().out
    assert [file.name for file in output.parent.iterdir()] == ["out.parquet"]


def test_another_plan_does_not_go_on(task, whole, tmp_path):
    output = tmp_path / "out.parquet"
    run(task, output)
    with pytest.raises(UserError, match=r"out.parquet was made with another rollout; delete it, or write elsewhere"):
        run(task, output, rollout__temperature=0.5)
    with pytest.raises(UserError, match=r"data.output_path=x.json: give the parquet file"):
        run(task, "x.json")


def test_a_killed_run_goes_on(task, whole, tmp_path):
    output = tmp_path / "out.parquet"
    parts = tmp_path / "out.parquet.parts"
    for stop_at in (1, 3):
        process = subprocess.Popen(
            [sys.executable, "-m", "podium.trainer.main_generate", *arguments(task, output)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 120
        while len(list(parts.glob("*.parquet"))) < stop_at and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not output.exists() and len(list(parts.glob("*.parquet"))) in range(3, 6)
    (parts / "000000000020.parquet.tmp").write_bytes(b"half a file")  # killed while writing
    assert run(task, output) == whole
    assert not parts.exists()


def test_greedy_needs_no_samples():
    with pytest.raises(UserError, match=r"rollout.n=2: greedy generation gives one answer"):
        check_generate_config(*load_config(GenerateConfig, ["rollout.n=2", "rollout.temperature=0"]))
    with pytest.raises(UserError, match=r"rollout.weight_sync.verify has no effect without a trainer"):
        check_generate_config(*load_config(GenerateConfig, ["rollout.weight_sync.verify=off"]))


@pytest.mark.slow
def test_ranks_may_share_a_copy_of_the_model(task, tmp_path, monkeypatch):
    """Greedy responses of one vLLM over two ranks are those of plain transformers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    greedy = {"rollout__n": 1, "rollout__temperature": 0}
    whole = run(task, tmp_path / "hf.parquet", **greedy)
    two = {"rollout__name": "vllm", "rollout__tensor_model_parallel_size": 2, "trainer__n_gpus_per_node": 2}
    assert run(task, tmp_path / "vllm.parquet", **greedy, **two) == whole
    for changes, message in (
        ({"trainer__n_gpus_per_node": 3}, "tensor_model_parallel_size=2 does not divide the rollout's 3 rank"),
        ({"rollout__name": "hf"}, "rollout.name=hf keeps whole models; use vllm, or 1"),
    ):
        with pytest.raises(UserError, match=message):
            run(task, tmp_path / "x.parquet", **(two | changes))
