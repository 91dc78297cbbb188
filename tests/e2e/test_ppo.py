"""main_ppo and main_sft as commands: what they write, and that the numbers hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.commands import PPO, SFT, Preloaded, Result, metrics, run
from tests.small_task import SmallTask

ACTOR = "actor_rollout_ref__actor__"
ROLLOUT = "actor_rollout_ref__rollout__"
PHASES = ("gen", "reward", "old_log_prob", "values", "adv", "update_critic", "update_actor", "weight_sync")
NAMED = (
    "actor/pg_loss",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "actor/entropy",
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/vf_loss",
    "response_length/mean",
    "perf/throughput",
    "perf/time_per_step",
    "training/rollout_probs_diff_mean",
    *(f"timing_s/{phase}" for phase in PHASES),
)


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(run_dir) if row["step"] > 0]


def finished(result: Result) -> None:
    assert result.code == 0, str(result)
    assert not result.error_lines and "Traceback" not in result.err, str(result)
    assert not result.left


def computed(row: dict[str, Any]) -> dict[str, Any]:
    """A line without what the clock says."""
    return {name: value for name, value in row.items() if not name.startswith(("timing_s/", "perf/"))}


def on_policy(run_dir: Path) -> None:
    """The policy that is updated is the one that drew the tokens."""
    for row in steps(run_dir):
        assert row["training/first_ratio_dev_max"] < 1e-4
        assert row["training/rollout_log_probs_diff_mean"] < 1e-3
        assert row["training/rollout_probs_diff_mean"] < 1e-3


def close(left: dict[str, Any], right: dict[str, Any], tolerance: float) -> None:
    """Equal to rounding, metric by metric."""
    assert left.keys() == right.keys()
    for name, value in computed(left).items():
        if isinstance(value, float) and "diff" not in name and "ratio_dev" not in name:
            assert math.isclose(value, right[name], rel_tol=tolerance, abs_tol=1e-5), (name, value, right[name])


@pytest.fixture(scope="module")
def base(command: Preloaded, task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of PPO with a KL in the reward, on one local rank: what the other runs are compared with."""
    run_dir = tmp_path_factory.mktemp("base") / "run"
    finished(command(PPO, task.ppo(run_dir, algorithm__kl_ctrl__kl_coef=0.01)))
    return run_dir


def test_ray_with_vllm(task: SmallTask, tmp_path):
    run_dir = tmp_path / "run"
    changes = {
        "data__train_batch_size": 32,
        f"{ACTOR}ppo_mini_batch_size": 32,
        f"{ROLLOUT}name": "vllm",
        f"{ROLLOUT}n": 2,
        "critic__optim__lr": 1e-3,
        "algorithm__adv_estimator": "gae",
        "algorithm__kl_ctrl__kl_coef": 0.001,
        "trainer__backend": "ray",
        "trainer__total_training_steps": 3,
        "trainer__total_epochs": 1,
        "trainer__nnodes": 1,
        "trainer__n_gpus_per_node": 1,
        "trainer__logger": "[console]",
        "trainer__test_freq": 2,
        "trainer__save_freq": 2,
    }
    result = run(PPO, task.ppo(run_dir, **changes))
    finished(result)
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        missing = [name for name in (*NAMED, "timing_s/ref") if name not in row]
        assert not missing
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["weight_sync/verified_buckets"] == 1 and row["weight_sync/version"] == row["step"]
    assert [any(name.startswith("val/") for name in row) for row in rows] == [True, False, True, True]
    on_policy(run_dir)
    assert any(row["training/rollout_log_probs_diff_max"] > 0 for row in rows[1:]), "two engines, bit for bit the same?"
    assert "step 3/3" in result.out and "validation samples" in result.out and "\x1b" not in result.out
    assert [line["step"] for line in map(json.loads, (run_dir / "val_samples.jsonl").open())] == [3] * 8

    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    for step in (2, 3):
        checkpoint = run_dir / f"global_step_{step}"
        assert {path.name for path in checkpoint.iterdir()} == {"actor", "critic", "manifest.json", "manifest.sha256"}
        assert json.loads((checkpoint / "manifest.json").read_text())["step"] == step
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    untrained = AutoModelForCausalLM.from_pretrained(task.model)
    assert type(trained) is type(untrained)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), untrained.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    assert tokenizer("12=").input_ids == AutoTokenizer.from_pretrained(task.model)("12=").input_ids


def test_a_short_run_says_what_it_does(base: Path, task: SmallTask):
    rows = metrics(base)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    on_policy(base)
    for row in rows[1:]:
        assert not [name for name in (*NAMED, "timing_s/ref") if name not in row]
        spent = sum(row[f"timing_s/{phase}"] for phase in PHASES)
        assert spent <= row["timing_s/step"] * 1.01
        # The KL takes from the reward what it says it takes.
        taken = row["critic/score/mean"] - row["critic/rewards/mean"]
        expected = 0.01 * row["actor/reward_kl_penalty"] * row["response_length/mean"]
        assert math.isclose(taken, expected, rel_tol=0.1, abs_tol=1e-4)
    assert rows[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert json.loads((base / "config.json").read_text())["algorithm"]["kl_ctrl"]["kl_coef"] == 0.01
    # What is on the disk is what was trained, in both forms: a critic's checkpoint holds its value head too.
    assert sorted(path.name for path in base.glob("global_step_*")) == ["global_step_3"]
    AutoModelForCausalLM.from_pretrained(base / "export")


def test_the_same_seed_twice(command: Preloaded, task: SmallTask, base: Path, tmp_path):
    finished(command(PPO, task.ppo(tmp_path / "run", algorithm__kl_ctrl__kl_coef=0.01)))
    assert list(map(computed, metrics(tmp_path / "run"))) == list(map(computed, metrics(base)))
    ours, theirs = (run_dir / "export" / "model.safetensors" for run_dir in (tmp_path / "run", base))
    assert ours.read_bytes() == theirs.read_bytes()


def test_another_seed_samples_anew(command: Preloaded, task: SmallTask, base: Path, tmp_path):
    argv = task.ppo(
        tmp_path / "run", algorithm__kl_ctrl__kl_coef=0.01, trainer__seed=1, trainer__total_training_steps=1
    )
    finished(command(PPO, argv))
    ours, theirs = metrics(tmp_path / "run"), metrics(base)
    assert computed(ours[0]) == computed(theirs[0]), "greedy validation before training depends on no seed"
    assert ours[1]["critic/score/mean"] != theirs[1]["critic/score/mean"]


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_two_ranks_are_one_to_rounding(command: Preloaded, task: SmallTask, base: Path, tmp_path, backend):
    changes = {"trainer__n_gpus_per_node": 2, "trainer__backend": backend, "algorithm__kl_ctrl__kl_coef": 0.01}
    finished(command(PPO, task.ppo(tmp_path / "run", **changes)))
    for one, two in list(zip(metrics(base), metrics(tmp_path / "run"), strict=True))[:3]:
        assert computed(one).keys() == computed(two).keys()
        close(one, two, 1e-3)


def test_micro_batches_change_nothing(command: Preloaded, task: SmallTask, base: Path, tmp_path):
    changes = {f"{ACTOR}ppo_micro_batch_size_per_gpu": 5, "algorithm__kl_ctrl__kl_coef": 0.01}
    finished(command(PPO, task.ppo(tmp_path / "run", trainer__total_training_steps=2, **changes)))
    for whole, cut in zip(metrics(base), metrics(tmp_path / "run"), strict=False):
        cut.pop("actor/all_masked_micro_batches", None)
        shared = {name: whole[name] for name in whole if name in cut and not name.startswith("val/")}
        close(shared, {name: cut[name] for name in shared}, 1e-3)


def test_several_epochs_and_mini_batches(command: Preloaded, task: SmallTask, tmp_path):
    changes = {
        f"{ACTOR}ppo_epochs": 2,
        f"{ACTOR}ppo_mini_batch_size": 4,
        f"{ACTOR}ppo_micro_batch_size_per_gpu": 3,
        f"{ACTOR}entropy_coeff": 0.01,
        f"{ROLLOUT}n": 2,
        "critic__ppo_epochs": 1,
        "critic__ppo_mini_batch_size": 8,
        "trainer__total_training_steps": 2,
    }
    result = command(PPO, task.ppo(tmp_path / "run", **changes))
    finished(result)
    assert "mini-batch 8 sequences (8 a rank, micro-batch 3), 16 optimizer steps" in result.out
    assert "critic: mini-batch 16 sequences (16 a rank, micro-batch 3), 4 optimizer steps" in result.out
    on_policy(tmp_path / "run")
    for row in steps(tmp_path / "run"):
        assert row["actor/ratio_dev_max"] > 1e-3 > row["training/first_ratio_dev_max"]
        assert 0 < row["actor/pg_clipfrac"] < 1


def test_grpo_with_the_kl_in_the_loss(command: Preloaded, task: SmallTask, tmp_path):
    changes = {
        "data__train_batch_size": 8,
        f"{ACTOR}ppo_mini_batch_size": 4,
        f"{ACTOR}use_kl_loss": "true",
        f"{ACTOR}kl_loss_coef": 0.05,
        f"{ROLLOUT}n": 4,
        "algorithm__adv_estimator": "grpo",
    }
    result = command(PPO, task.ppo(tmp_path / "run", **changes))
    finished(result)
    rows = steps(tmp_path / "run")
    on_policy(tmp_path / "run")
    assert "critic" not in result.out
    assert not [name for name in rows[0] if name.startswith(("critic/vf", "critic/values", "timing_s/update_critic"))]
    assert "timing_s/ref" in rows[0]
    kl = [row["actor/kl_loss"] for row in rows]
    assert all(value >= 0 for value in kl) and kl[2] > kl[0]
    assert abs(rows[0]["critic/advantages/mean"]) < 0.1
    assert {path.name for path in (tmp_path / "run" / "global_step_3").iterdir()} == {
        "actor",
        "manifest.json",
        "manifest.sha256",
    }


def test_critic_warm_up_leaves_the_policy_alone(command: Preloaded, task: SmallTask, tmp_path):
    changes = {"trainer__critic_warmup": 2, "trainer__test_freq": 1, "critic__optim__lr": 1e-2}
    finished(command(PPO, task.ppo(tmp_path / "run", **changes)))
    rows = metrics(tmp_path / "run")
    assert ["actor/pg_loss" in row for row in rows] == [False, False, False, True]
    assert ["critic/vf_loss" in row for row in rows] == [False, True, True, True]
    assert [row.get("weight_sync/version") for row in rows] == [0, None, None, 1]
    scores = [row["val/score/mean"] for row in rows]
    assert scores[0] == scores[1] == scores[2]
    assert rows[3]["critic/values/mean"] != 0 and rows[1]["critic/values/mean"] == 0


def test_validation_only(command: Preloaded, task: SmallTask, tmp_path):
    changes = {
        "trainer__val_only": "true",
        "trainer__val_before_train": "false",
        f"{ROLLOUT}val_kwargs__n": 3,
        f"{ROLLOUT}val_kwargs__temperature": 1.0,
        "data__val_batch_size": 7,
    }
    result = command(PPO, task.ppo(tmp_path / "run", **changes))
    finished(result)
    [row] = metrics(tmp_path / "run")
    assert (
        row["val/podium/sort6/score/best@3"]
        > row["val/podium/sort6/score/mean@3"]
        == pytest.approx(row["val/score/mean"])
    )
    assert "validation samples, step 0" in result.out
    assert not (tmp_path / "run" / "export").exists()


def test_without_validation(command: Preloaded, task: SmallTask, tmp_path):
    changes = {"data__val_files": None, "trainer__val_before_train": "false", "trainer__total_training_steps": 1}
    finished(command(PPO, task.ppo(tmp_path / "run", **changes)))
    [row] = metrics(tmp_path / "run")
    assert row["step"] == 1 and not [name for name in row if name.startswith("val/")]
    spent = row["timing_s/weight_sync"] + row["timing_s/update_actor"] + row["timing_s/gen"]
    assert spent < row["timing_s/step"]


def test_sft_warm_start(command: Preloaded, task: SmallTask, tmp_path):
    run_dir = tmp_path / "sft"
    changes = {"trainer__total_epochs": 3, "trainer__test_freq": 4, "data__micro_batch_size_per_gpu": 12}
    result = command(SFT, task.sft(run_dir, **changes))
    finished(result)
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["training/epoch"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert ["val/loss" in row for row in rows] == [step % 4 == 0 for step in range(1, 13)]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.5
    assert rows[-1]["val/loss"] < rows[3]["val/loss"]
    assert rows[-1]["val/perplexity"] == pytest.approx(math.exp(rows[-1]["val/loss"]))
    AutoModelForCausalLM.from_pretrained(run_dir / "export")
    # PPO starts from what SFT exports.
    argv = task.ppo(
        tmp_path / "ppo", actor_rollout_ref__model__path=run_dir / "export", trainer__total_training_steps=1
    )
    finished(command(PPO, argv))


PROGRAM = """
import time
from podium.trainer.main_ppo import main, run_main
from podium.trainer.ppo.losses import register_policy_loss
from podium.trainer.ppo.policy_losses import compute_policy_loss_vanilla

@register_policy_loss("broken")
def broken(*args, **kwargs):
    raise RuntimeError("this loss is broken")

@register_policy_loss("endless")
def endless(*args, **kwargs):
    print("the loss hangs", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    run_main(main)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A user's script with losses of its own: they travel to the workers, which never see the script."""
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(PROGRAM)
    yield str(path)


WAYS = [("local", 1), pytest.param("local", 2, marks=pytest.mark.slow), ("ray", 1)]


@pytest.mark.parametrize(("backend", "ranks"), WAYS)
def test_a_failure_in_a_worker(command: Preloaded, task: SmallTask, program: str, tmp_path, backend, ranks):
    changes = {f"{ACTOR}policy_loss__loss_mode": "broken", "trainer__backend": backend}
    result = command(program, task.ppo(tmp_path / "run", trainer__n_gpus_per_node=ranks, **changes))
    assert result.code == 1, str(result)
    assert "this loss is broken" in result.err and "in broken" in result.err, str(result)
    assert "actor.update_actor failed on rank " in result.err
    assert not result.error_lines and not result.left
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0]


@pytest.mark.parametrize(("backend", "ranks"), WAYS)
def test_ctrl_c(command: Preloaded, task: SmallTask, program: str, tmp_path, backend, ranks):
    changes = {f"{ACTOR}policy_loss__loss_mode": "endless", "trainer__backend": backend}
    argv = task.ppo(tmp_path / "run", trainer__n_gpus_per_node=ranks, **changes)
    result = command(program, argv, signal_after="step 0/3")
    assert result.code == 130, str(result)
    assert "interrupted" in result.err and "Traceback" not in result.err, str(result)
    assert not result.left


@pytest.mark.parametrize("started", ["gcs/gcs_server", "raylet/raylet"])
def test_ctrl_c_while_ray_starts(command: Preloaded, task: SmallTask, tmp_path, started: str):
    result = command(PPO, task.ppo(tmp_path / "run", trainer__backend="ray"), signal_after=started)
    assert result.code == 130, str(result)
    assert not result.left


@pytest.mark.slow
def test_the_reward_rises(command: Preloaded, task: SmallTask, tmp_path):
    changes = {
        "data__train_batch_size": 64,
        f"{ACTOR}ppo_mini_batch_size": 64,
        f"{ACTOR}ppo_micro_batch_size_per_gpu": 64,
        f"{ACTOR}optim__lr": 5e-4,
        "critic__optim__lr": 1e-3,
        "algorithm__kl_ctrl__kl_coef": 0.001,
        "trainer__total_training_steps": 60,
        "trainer__total_epochs": 10,
    }
    finished(command(PPO, task.ppo(tmp_path / "run", **changes), timeout_s=300))
    rows = steps(tmp_path / "run")
    on_policy(tmp_path / "run")
    first, last = (sum(row["critic/score/mean"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert first < 0.3 and last > 0.8
    assert rows[-1]["val/score/mean"] > 0.9
