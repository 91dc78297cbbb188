"""Runs that are killed at every place and go on end where a run that nobody touched ends: the same bytes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.utils.run_lock import only_run
from tests.e2e.commands import PPO, SFT, Preloaded, Result, metrics
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
SHORT = ["update:2", "end:2", "commit:2", "mark:2", "update:5"]
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
        killed(command(program, argv, env={"PODIUM_TEST_KILL": place}, timeout_s=600))
    result = command(program, argv, timeout_s=600)
    finished(result)
    return result


WAYS = [
    ("ppo", 1, SHORT),
    pytest.param("ppo", 1, CHAIN, marks=pytest.mark.slow),
    pytest.param("grpo", 1, CHAIN, marks=pytest.mark.slow),
    pytest.param("dapo", 1, SHORT, marks=pytest.mark.slow),
    pytest.param("ppo", 2, CHAIN, marks=pytest.mark.slow),
    pytest.param("grpo", 2, CHAIN, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("algorithm", "ranks", "places"), WAYS)
def test_killed_anywhere_a_run_ends_where_it_would_have(
    command: Preloaded, task: SmallTask, tmp_path: Path, algorithm: str, ranks: int, places: list[str]
):
    changes = COMMON | ALGORITHMS[algorithm] | {"trainer__n_gpus_per_node": ranks}
    straight, run_dir = tmp_path / "straight", tmp_path / "killed"
    finished(command(PPO, task.ppo(straight, **changes), timeout_s=600))
    result = kill_and_go_on(command, PPO, task.ppo(run_dir, **changes), places)
    same(straight, run_dir)
    assert f"resume  after step 4, from {run_dir}/global_step_4" in result.out
    assert not list(run_dir.glob("*.tmp")) and not list(run_dir.glob("*.old"))
    again = command(PPO, task.ppo(run_dir, **changes))
    finished(again)
    assert f"nothing to do: {run_dir}/global_step_6 has all of the 6 steps" in again.out
    same(straight, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_killed_anywhere_on_both_engines_and_two_ranks(
    command: Preloaded, task: SmallTask, tmp_path: Path, strategy: str
):
    changes = COMMON | {
        "algorithm__adv_estimator": "gae",
        f"{ACTOR}strategy": strategy,
        "critic__strategy": strategy,
        "trainer__n_gpus_per_node": 2,
    }
    if strategy == "megatron":
        changes |= {
            f"{ACTOR}megatron__tensor_model_parallel_size": 2,
            "critic__megatron__tensor_model_parallel_size": 2,
        }
    straight, run_dir = tmp_path / "straight", tmp_path / "killed"
    finished(command(PPO, task.ppo(straight, **changes), timeout_s=600))
    kill_and_go_on(command, PPO, task.ppo(run_dir, **changes), ["update:2", "end:3", "commit:3", "begin:5"])
    same(straight, run_dir)


def test_supervised_fine_tuning(command: Preloaded, task: SmallTask, tmp_path: Path):
    changes = {
        "trainer__total_epochs": 2,
        "trainer__save_freq": 1,
        "trainer__async_save": "true",
        "trainer__max_ckpt_to_keep": 2,
        "trainer__best_ckpt_metric": "val/loss",
        "trainer__best_ckpt_mode": "min",
        "trainer__test_freq": 1,
    }
    straight, run_dir = tmp_path / "straight", tmp_path / "stopped"
    finished(command(SFT, task.sft(straight, **changes)))
    stopped(command(SFT, task.sft(run_dir, **changes), signal_after="step 3/8", signal_number=signal.SIGTERM), run_dir)
    finished(command(SFT, task.sft(run_dir, **changes)))
    same(straight, run_dir)
    assert sorted(path.name for path in run_dir.glob("global_step_*")) == ["global_step_7", "global_step_8"]
    assert (run_dir / "best_checkpointed_iteration.txt").read_text() == "8\n"


def stopped(result: Result, run_dir: Path) -> int:
    """The step that SIGTERM saved."""
    assert result.code == 143 and not result.left, str(result)
    assert "Traceback" not in result.err, str(result)
    saved = int((run_dir / "latest_checkpointed_iteration.txt").read_text())
    assert f"stopped by SIGTERM after step {saved}; the run goes on from {run_dir}/global_step_{saved}" in result.err
    return saved


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_sigterm_saves_first(command: Preloaded, task: SmallTask, tmp_path: Path, backend: str):
    """Nothing else is saved before the end."""
    changes = {"trainer__total_training_steps": 40, "trainer__backend": backend, "trainer__preempt_grace_s": 100}
    run_dir = tmp_path / "run"
    result = command(PPO, task.ppo(run_dir, **changes), signal_after="step  2/40", signal_number=signal.SIGTERM)
    saved = stopped(result, run_dir)
    assert [row["step"] for row in metrics(run_dir)] == list(range(saved + 1))


def test_sigterm_in_a_step_that_takes_too_long(command: Preloaded, task: SmallTask, tmp_path: Path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef compute_score(**kwargs):\n    time.sleep(0.5)\n    return 1.0\n")
    changes = {
        "custom_reward_function__path": slow,
        "trainer__val_before_train": "false",
        "trainer__preempt_grace_s": 0.5,
    }
    result = command(
        PPO, task.ppo(tmp_path / "run", **changes), signal_after="start 1 rank", signal_number=signal.SIGTERM
    )
    assert result.code in (143, -signal.SIGTERM) and not result.left, str(result)
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_what_a_resumed_run_may_change(command: Preloaded, task: SmallTask, tmp_path: Path):
    run_dir = tmp_path / "run"
    finished(command(PPO, task.ppo(run_dir, trainer__total_training_steps=2)))
    refused(
        command(PPO, task.ppo(run_dir, data__train_batch_size=32, trainer__total_training_steps=3)),
        "data.train_batch_size was 16 and is now 32",
    )
    refused(command(PPO, task.ppo(run_dir, trainer__resume_mode="disable")), "holds checkpoints of another run")
    refused(
        command(PPO, task.ppo(run_dir, trainer__total_training_steps=2, critic__optim__lr=1e-3)),
        "is finished (2 steps of 2)",
        "critic.optim.lr was 1e-05 and is now 0.001",
    )
    result = command(PPO, task.ppo(run_dir, trainer__total_training_steps=2, trainer__record_freq=1))
    finished(result)
    assert "nothing to do" in result.out
    # Other answers under the same prompts.
    rows = pq.read_table(task.train).to_pylist()
    other = [{**row, "reward_model": {**row["reward_model"], "ground_truth": "0"}} for row in rows]
    pq.write_table(pa.Table.from_pylist(other), tmp_path / "other.parquet")
    changes: dict[str, Any] = {"data__train_files": tmp_path / "other.parquet", "trainer__total_training_steps": 3}
    refused(command(PPO, task.ppo(run_dir, **changes)), "data.train_files has other rows", "what they are scored by")
    changes = {"data__train_weights": "[1.0]", "trainer__total_training_steps": 3}
    refused(command(PPO, task.ppo(run_dir, **changes)), "data.train_weights was None and is now [1.0]")
    # More steps, another micro-batch, two ranks where there was one, and in another directory.
    changes = {
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": run_dir,
        f"{ACTOR}ppo_micro_batch_size_per_gpu": 4,
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": 4,
    }
    result = command(PPO, task.ppo(tmp_path / "other", **changes))
    finished(result)
    assert f"changed: {ACTOR.replace('__', '.')}ppo_micro_batch_size_per_gpu: 16 -> 4" in result.out
    assert [row["step"] for row in metrics(tmp_path / "other")] == [3, 4]
    # A damaged checkpoint is named, and the one before it taken.
    [file] = (tmp_path / "other" / "global_step_4" / "critic").glob("shard-00001*")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    result = command(PPO, task.ppo(tmp_path / "other", trainer__total_training_steps=5))
    refused(result, "no whole checkpoint is left", str(file))
    result = command(PPO, task.ppo(run_dir, trainer__total_training_steps=3))
    finished(result)
    assert [row["step"] for row in metrics(run_dir)] == [0, 1, 2, 3]


def test_one_run_at_a_time(command: Preloaded, task: SmallTask, tmp_path: Path):
    ppo, sft = tmp_path / "ppo", tmp_path / "sft"
    for run_dir, program, argv in ((ppo, PPO, task.ppo(ppo)), (sft, SFT, task.sft(sft))):
        run_dir.mkdir()
        (run_dir / "global_step_1.tmp").mkdir()
        with only_run(run_dir):
            refused(command(program, argv), f"{run_dir} is in use by another run (process {os.getpid()} on ")
        assert sorted(path.name for path in run_dir.iterdir()) == ["global_step_1.tmp", "run.lock"]
