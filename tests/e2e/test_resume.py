"""Runs that are killed at every place and go on end where a run that nobody touched ends: the same bytes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import PPO, Preloaded, Result, metrics
from tests.small_task import SmallTask

KILLED = Path(__file__).with_name("killed.py")
ACTOR = "actor_rollout_ref__actor__"
ROLLOUT = "actor_rollout_ref__rollout__"
# Four steps are an epoch.
COMMON = {
    "data__train_batch_size": 64,
    f"{ACTOR}ppo_mini_batch_size": 32,
    f"{ACTOR}ppo_micro_batch_size_per_gpu": 64,
    f"{ACTOR}optim__lr_scheduler_type": "cosine",
    f"{ACTOR}optim__lr_warmup_steps": 3,
    "trainer__plugins": f"[{KILLED}]",
    "trainer__save_freq": 1,
    "trainer__total_training_steps": 6,
    "trainer__test_freq": 2,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm__kl_ctrl__kl_coef": 0.05,
        "algorithm__kl_ctrl__type": "adaptive",
        "algorithm__kl_ctrl__horizon": 100,
        "critic__optim__lr": 1e-3,
        "trainer__critic_warmup": 2,
    },
    "grpo": {
        "algorithm__adv_estimator": "grpo",
        f"{ROLLOUT}n": 2,
        f"{ACTOR}use_kl_loss": "true",
        f"{ACTOR}ppo_epochs": 2,
    },
    "dapo": {
        "algorithm__adv_estimator": "grpo",
        "algorithm__filter_groups__enable": "true",
        f"{ROLLOUT}n": 4,
        "data__train_batch_size": 8,
        f"{ACTOR}ppo_mini_batch_size": 8,
    },
}
# Before anything is saved; in the middle of a step; at each place of a save; at the start of an epoch.
CHAIN = ["update:1", "update:2", "save:2", "end:2", "commit:2", "mark:2", "begin:5", "update:5"]


def killed(result: Result) -> None:
    assert result.code == -signal.SIGKILL, str(result)
    assert not result.left


def finished(result: Result) -> None:
    assert result.code == 0, str(result)
    assert not result.left


def refused(result: Result, *words: str) -> None:
    assert result.code == 2 and len(result.error_lines) == 1, str(result)
    assert all(word in result.err for word in words), str(result)


def computed(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what the clock says."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("timing_s/", "perf/"))}
        for row in metrics(run_dir)
    ]


def weights(run_dir: Path) -> dict[str, bytes]:
    """The data of every tensor file of the last checkpoint and of the export."""
    last = (run_dir / "latest_checkpointed_iteration.txt").read_text().strip()
    files = [*(run_dir / f"global_step_{last}").rglob("*.safetensors"), *(run_dir / "export").glob("*.safetensors")]
    return {str(file.relative_to(run_dir)): tensor_data(file) for file in files}


def tensor_data(file: Path) -> bytes:
    """What follows the header, whose fields safetensors writes in any order."""
    content = file.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def same(left: Path, right: Path) -> None:
    assert computed(left) == computed(right)
    assert weights(left) == weights(right)


def kill_and_go_on(command: Preloaded, program: str, argv: list[str], places: list[str]) -> Result:
    for place in places:
        killed(command(program, argv, env={"PODIUM_TEST_KILL": place}))
    result = command(program, argv)
    finished(result)
    return result


WAYS = [
    ("ppo", 1),
    pytest.param("grpo", 1, marks=pytest.mark.slow),
    pytest.param("dapo", 1, marks=pytest.mark.slow),
    pytest.param("ppo", 2, marks=pytest.mark.slow),
    pytest.param("grpo", 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("algorithm", "ranks"), WAYS)
def test_killed_anywhere_a_run_ends_where_it_would_have(
    command: Preloaded, task: SmallTask, tmp_path: Path, algorithm: str, ranks: int
):
    changes = COMMON | ALGORITHMS[algorithm] | {"trainer__n_gpus_per_node": ranks}
    straight, run_dir = tmp_path / "straight", tmp_path / "killed"
    finished(command(PPO, task.ppo(straight, **changes)))
    places = CHAIN if algorithm == "ppo" else [place for place in CHAIN if place != "begin:5"]
    result = kill_and_go_on(command, PPO, task.ppo(run_dir, **changes), places)
    same(straight, run_dir)
    assert f"resume  after step 4, from {run_dir}/global_step_4" in result.out
    assert not list(run_dir.glob("*.tmp")) and not list(run_dir.glob("*.old"))
    again = command(PPO, task.ppo(run_dir, **changes))
    finished(again)
    assert f"nothing to do: {run_dir}/global_step_6 has all of the 6 steps" in again.out
    same(straight, run_dir)
