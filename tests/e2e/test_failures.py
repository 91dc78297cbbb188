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
    assert "step 2: 1 of 1 updates of the actor" in result.err

    replay = ["replay", str(run_dir), "--step", "2"]
    result = command("podium", replay, env={"PODIUM_TEST_FAULT": "nan:1"})  # the update alone: it is the first
    finished(result)
    assert "optimizer steps that were not made (from 0): 0\n" in result.out
    assert "replay of step 2: every metric equal" in result.out
    result = command("podium", replay)
    assert result.code == 1 and "actor/skipped_steps: 1.0 -> 0.0" in result.out, str(result)


def test_too_many_of_them_end_the_run(command: Preloaded, task: SmallTask, tmp_path: Path):
    argv = task.ppo(tmp_path / "run", **COMMON, trainer__max_bad_steps=2)
    fault = {"PODIUM_TEST_FAULT": "nan:always"}
    refused(command(PPO, argv, env=fault), "2 updates of the actor in a row", "bad_steps")
    for step in (1, 2):  # one from the start, one that was not even recorded
        result = command("podium", ["replay", str(tmp_path / "run"), "--step", str(step)], env=fault)
        finished(result)
        assert ("every metric equal" if step == 1 else "the run ended in it") in result.out
        assert "actor/skipped_steps: 1.0" in result.out or step == 1


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


@pytest.mark.parametrize(
    "layout",
    [
        {},
        pytest.param({"trainer__n_gpus_per_node": 2}, marks=pytest.mark.slow),
        pytest.param(
            {
                "trainer__n_gpus_per_node": 2,
                "actor_rollout_ref__actor__strategy": "megatron",
                "critic__strategy": "megatron",
                "actor_rollout_ref__actor__megatron__tensor_model_parallel_size": 2,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one rank", "fsdp 2", "megatron tp2"],
)
def test_a_recorded_update_is_made_again_alone(
    command: Preloaded, task: SmallTask, tmp_path: Path, layout: dict[str, object]
):
    """Nothing is generated: what the policy says, and how often it was asked, cannot differ."""
    run_dir = tmp_path / "run"
    keys = {**COMMON, "trainer__record_freq": 2, "critic__optim__lr": 1e-2, **layout}
    finished(command(PPO, task.ppo(run_dir, **keys)))
    names = sorted(path.name for path in (run_dir / "bundles").iterdir())
    assert names == [f"step_{step}_{role}.safetensors" for step in (2, 4) for role in ("actor", "critic")]
    result = command("podium", ["replay", str(run_dir), "--step", "4"])
    finished(result)
    assert "replay of the update of the critic on its batch of step 4" in result.out
    assert f"after step 3, from {run_dir}/global_step_3" in result.out and "step  4/4" not in result.out
    assert "replay of step 4: every metric equal" in result.out

    path = run_dir / "bundles" / "step_4_actor.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(command("podium", ["replay", str(run_dir), "--step", "4"]), "step_4_actor.safetensors is no batch")


@pytest.mark.parametrize("restarts", [0, 1])
def test_one_rank_in_the_drivers_process_has_a_deadline_too(
    command: Preloaded, task: SmallTask, tmp_path: Path, restarts: int
):
    run_dir = tmp_path / "run"
    argv = task.ppo(run_dir, **COMMON, trainer__deadlines__update_s=10, trainer__max_restarts=restarts)
    result = command(PPO, argv, env={"PODIUM_TEST_FAULT": "sleep:3", "PODIUM_TEST_MARKER": str(tmp_path / "marker")})
    assert result.code == 1 - restarts, str(result)
    assert "actor.update_actor did not finish within 10 s" in result.err
    assert "(phase update; if it only needs longer, raise trainer.deadlines.update_s)" in result.err
    assert "time.sleep(600)" in (run_dir / "blame.txt").read_text()
    if restarts:
        assert f"restart 1 of 1: after step 2, from {run_dir}/global_step_2" in result.err
        straight = tmp_path / "straight"
        finished(command(PPO, task.ppo(straight, **COMMON)))
        same(straight, run_dir)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        pytest.param({"trainer__n_gpus_per_node": 2, "trainer__async_save": "true"}, marks=pytest.mark.slow),
    ],
    ids=["one rank", "two ranks, beside"],
)
def test_weights_that_are_not_finite_are_not_saved(
    command: Preloaded, task: SmallTask, tmp_path: Path, layout: dict[str, object]
):
    """The run ends; what it goes on from then is from before, and it ends as one that nothing happened to."""
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    argv = task.ppo(run_dir, **COMMON, **layout, trainer__max_ckpt_to_keep=1)
    finished(command(PPO, task.ppo(straight, **COMMON, **layout, trainer__max_ckpt_to_keep=1)))
    fault = {"PODIUM_TEST_FAULT": "poison:2", "PODIUM_TEST_MARKER": str(tmp_path / "marker")}
    result = command(PPO, argv, env=fault)
    refused(result, "in a row were not finite")
    for step in (2, 3):
        assert f"checkpoint  step {step} was not saved" in result.err
    assert "are not finite; the run goes on from" in result.err
    assert [path.name for path in run_dir.glob("global_step_*")] == ["global_step_1"]
    result = command(PPO, argv)
    finished(result)
    assert "after step 1, from" in result.out
    same(straight, run_dir)
