"""The rollout in processes of its own: the same numbers as in the actor's, whichever way the weights travel."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import PPO, metrics, run
from tests.e2e.test_ppo import ROLLOUT, computed, finished, on_policy
from tests.small_task import SmallTask

WAYS = {
    "device": {"placement": "device"},
    "apart": {"placement": "apart", "n_gpus_per_node": 1, "weight_sync__transport": "broadcast"},
}


COMMON = {"trainer__total_training_steps": 2, "trainer__save_freq": -1}


@pytest.fixture(scope="module")
def together(task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all roles in one process."""
    run_dir = tmp_path_factory.mktemp("together") / "run"
    finished(run(PPO, task.ppo(run_dir, **COMMON)))
    return run_dir


@pytest.mark.parametrize(
    ("way", "transport", "backend"),
    [
        ("device", "ipc", "local"),
        pytest.param("apart", "broadcast", "local", marks=pytest.mark.slow),
        pytest.param("device", "ipc", "ray", marks=pytest.mark.slow),
        pytest.param("apart", "broadcast", "ray", marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_one_process(
    task: SmallTask, together: Path, tmp_path: Path, way: str, transport: str, backend: str
):
    keys = {f"{ROLLOUT}{name}": value for name, value in WAYS[way].items()}
    ours = run(PPO, task.ppo(tmp_path / "own", trainer__backend=backend, **COMMON, **keys))
    finished(ours)
    assert f"weight sync by transport {transport}" in ours.out
    for one, own in zip(metrics(together), metrics(tmp_path / "own"), strict=True):
        assert computed(own) == computed(one)
    ledger = [json.loads(line) for line in (tmp_path / "own" / "weight_sync.jsonl").open()]
    assert [row["version"] for row in ledger] == [0, 1, 2]
    for row in ledger:
        assert row["transport"] == transport and row["messages"] == 1 and row["bytes"] == row["bytes_received"] > 0
        assert row["verified_buckets"] == row["buckets"] > 0 and row["pause_seconds"] >= row["seconds"] > 0
        assert row["share_of_bound"] == row["bound_seconds"] / row["seconds"] > 0


@pytest.mark.slow
def test_two_ranks_that_share_a_copy(task: SmallTask, tmp_path: Path):
    """vLLM over two ranks, in the processes of two FSDP ranks: what they generate is of the policy that is trained."""
    keys = {f"{ROLLOUT}name": "vllm", f"{ROLLOUT}tensor_model_parallel_size": 2, "trainer__n_gpus_per_node": 2}
    result = run(PPO, task.ppo(tmp_path / "run", **COMMON, **keys), timeout_s=600)
    finished(result)
    assert "rollout vllm, 2 ranks a copy" in result.out
    on_policy(tmp_path / "run")
    ledger = [json.loads(line) for line in (tmp_path / "run" / "weight_sync.jsonl").open()]
    assert all(row["bytes_received"] > 0 < row["bytes_local"] for row in ledger)
