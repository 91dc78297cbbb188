"""Runs that are interrupted where it is easy to lose something: at the export, over a restart, between two syncs."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.e2e.commands import PPO, Preloaded, metrics
from tests.e2e.test_failures import COMMON
from tests.e2e.test_resume import finished, refused, same
from tests.small_task import SmallTask

ACTOR_LR = "actor_rollout_ref__actor__optim__lr"


def fault(tmp_path: Path, what: str) -> dict[str, str]:
    return {"PODIUM_TEST_FAULT": what, "PODIUM_TEST_MARKER": str(tmp_path / "marker")}


def test_a_last_step_whose_export_failed_is_made_again(command: Preloaded, task: SmallTask, tmp_path: Path):
    run_dir, straight = tmp_path / "run", tmp_path / "straight"
    run_dir.mkdir()
    (run_dir / "export.tmp").touch()  # in the way
    argv = task.ppo(run_dir, **COMMON)
    assert command(PPO, argv).code == 1
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    (run_dir / "export.tmp").unlink()
    finished(command(PPO, argv))
    finished(command(PPO, task.ppo(straight, **COMMON)))
    same(straight, run_dir)


def test_sigterm_is_not_forgotten_where_a_call_hangs(command: Preloaded, task: SmallTask, tmp_path: Path):
    run_dir = tmp_path / "run"
    changes = {"trainer__deadlines__update_s": 8, "trainer__max_restarts": 1, "trainer__preempt_grace_s": 60}
    result = command(PPO, task.ppo(run_dir, **COMMON, **changes), env=fault(tmp_path, "termsleep:3"))
    assert result.code == 143 and "restart" not in result.err, str(result)
    assert f"the run goes on from {run_dir}/global_step_2" in result.err.splitlines()[-1]
    assert [row["step"] for row in metrics(run_dir)] == [0, 1, 2]


def test_sigterm_waits_for_the_weights_to_be_synced(command: Preloaded, task: SmallTask, tmp_path: Path):
    """A run that goes on begins with a sync; between two of them it would go on with other weights than it had."""
    run_dir, straight = tmp_path / "run", tmp_path / "straight"
    changes = {
        **COMMON,
        "trainer__save_freq": -1,
        "trainer__total_training_steps": 6,
        "actor_rollout_ref__rollout__weight_sync__frequency": 3,
    }
    argv = task.ppo(run_dir, **changes)
    result = command(PPO, argv, env=fault(tmp_path, "term:2"))
    assert result.code == 143 and "stopped by SIGTERM after step 3" in result.err, str(result)
    finished(command(PPO, argv))
    finished(command(PPO, task.ppo(straight, **changes)))
    assert [row["training/weight_age"] for row in metrics(run_dir)[1:]] == [0, 1, 2, 0, 1, 2]
    same(straight, run_dir)


def test_each_step_is_replayed_with_its_own_configuration(command: Preloaded, task: SmallTask, tmp_path: Path):
    """Nothing of a replay is saved, not even of a last step."""
    run_dir = tmp_path / "run"
    finished(command(PPO, task.ppo(run_dir, **COMMON | {"trainer__total_training_steps": 2})))
    finished(command(PPO, task.ppo(run_dir, **COMMON, **{ACTOR_LR: 3e-3})))
    for step in (2, 3, 4):
        result = command("podium", ["replay", str(run_dir), "--step", str(step)])
        finished(result)
        assert f"replay of step {step}: every metric equal" in result.out and "save_checkpoint" not in result.out
    shutil.rmtree(run_dir / "global_step_2")
    result = command("podium", ["replay", str(run_dir), "--step", "3"])
    assert result.code == 1 and "the configuration was another up to step 2" in result.out, str(result)
    refused(command("podium", ["replay", str(run_dir), "--step", "5"]), "has no step 5")
