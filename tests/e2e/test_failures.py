"""Faults at run time: updates that are not finite, and ranks that die, hang or fail alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import PPO, Preloaded, metrics
from tests.e2e.test_resume import finished, refused, same
from tests.small_task import SmallTask

PLUGIN = Path(__file__).with_name("failing.py")
COMMON: dict[str, Any] = {
    "trainer__plugins": f"[{PLUGIN}]",
    "actor_rollout_ref__actor__policy_loss__loss_mode": "failing",
    "trainer__save_freq": 1,
    "trainer__total_training_steps": 4,
}


def test_an_update_that_is_not_finite_is_skipped(command: Preloaded, task: SmallTask, tmp_path: Path):
    run_dir = tmp_path / "run"
    result = command(PPO, task.ppo(run_dir, **COMMON), env={"PODIUM_TEST_FAULT": "nan:2"})
    finished(result)
    rows = metrics(run_dir)[1:]
    assert [row["actor/skipped_steps"] for row in rows] == [0, 1, 0, 0]
    assert ["actor/pg_loss" in row for row in rows] == [True, False, True, True]
    assert (run_dir / "bad_steps" / "step_2_actor.safetensors").is_file()
    assert "step 2: 1 of 1 updates of the actor" in result.err


def test_too_many_of_them_end_the_run(command: Preloaded, task: SmallTask, tmp_path: Path):
    argv = task.ppo(tmp_path / "run", **COMMON, trainer__max_bad_steps=2)
    refused(command(PPO, argv, env={"PODIUM_TEST_FAULT": "nan:always"}), "2 updates of the actor in a row", "bad_steps")


def test_running_out_of_memory_is_told_with_the_keys_to_lower(command: Preloaded, task: SmallTask, tmp_path: Path):
    """The allocator's own refusal: 16 rows of at most 7 + 7 tokens."""
    argv = task.ppo(tmp_path / "run", **COMMON, trainer__val_before_train="false")
    result = command(PPO, argv, env={"PODIUM_TEST_FAULT": "memory:2"})
    refused(result, "out of memory in actor.update_actor on rank 0 (phase update)", "a micro-batch of 16 rows, ")
    assert "(224 with padding); tried to allocate 68719476736 bytes: lower " in result.err
    assert "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu or data.max_response_length" in result.err


@pytest.fixture(scope="module")
def straight(command: Preloaded, task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    finished(command(PPO, task.ppo(run_dir, **COMMON, trainer__n_gpus_per_node=2)))
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"), [("kill", "was killed by SIGKILL"), ("stop", "no answer yet from rank(s)")]
)
def test_the_workers_are_started_anew(
    command: Preloaded, task: SmallTask, tmp_path: Path, straight: Path, fault: str, words: str
):
    run_dir = tmp_path / "run"
    changes = {"trainer__n_gpus_per_node": 2, "trainer__max_restarts": 1, "trainer__rpc_timeout_s": 60}
    env = {"PODIUM_TEST_FAULT": f"{fault}:3", "PODIUM_TEST_MARKER": str(tmp_path / "marker")}
    result = command(PPO, task.ppo(run_dir, **COMMON, **changes), env=env, timeout_s=300)
    finished(result)
    assert words in result.err and "actor.update_actor" in result.err
    assert f"restart 1 of 1: after step 2, from {run_dir}/global_step_2" in result.err
    same(straight, run_dir)
    if fault == "stop":
        report = (run_dir / "blame.txt").read_text()
        assert "T (stopped)" in report and "update_actor" in report


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_run_at_once(command: Preloaded, task: SmallTask, tmp_path: Path):
    env = {"PODIUM_TEST_FAULT": "raise:2", "PODIUM_TEST_MARKER": str(tmp_path / "marker")}
    result = command(PPO, task.ppo(tmp_path / "run", **COMMON, trainer__n_gpus_per_node=2), env=env)
    assert result.code == 1 and "this rank fails alone" in result.err and "failed on rank 1" in result.err, str(result)
    assert result.seconds < 100 and not result.left
