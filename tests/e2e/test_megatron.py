"""PPO with every role on Megatron, as a command: what it trains is what FSDP trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.commands import PPO, Preloaded, metrics, run
from tests.e2e.test_ppo import ACTOR, ROLLOUT, close, computed, finished, on_policy, steps
from tests.small_task import SmallTask

KL = {"algorithm__kl_ctrl__kl_coef": 0.01}
MEGATRON = {f"{ACTOR}strategy": "megatron", "critic__strategy": "megatron", "trainer__n_gpus_per_node": 2}
TP2 = {f"{ACTOR}megatron__tensor_model_parallel_size": 2}
PP2 = {f"{ACTOR}megatron__pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def model(task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task's model, without a padding token in its config: transformers gives that token's embedding no gradient,
    and a model that knows nothing yet samples it."""
    path = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(task.model, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    return path


@pytest.fixture(scope="module")
def on_fsdp(command: Preloaded, task: SmallTask, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with every role on FSDP, on one rank."""
    run_dir = tmp_path_factory.mktemp("fsdp") / "run"
    finished(command(PPO, task.ppo(run_dir, actor_rollout_ref__model__path=model, **KL)))
    return run_dir


@pytest.mark.parametrize("layout", [pytest.param(TP2, id="tp2"), pytest.param(PP2, id="pp2", marks=pytest.mark.slow)])
def test_every_metric_is_that_of_fsdp(
    command: Preloaded, task: SmallTask, model: Path, on_fsdp: Path, tmp_path, layout
):
    changes = {"actor_rollout_ref__model__path": model, **KL, **MEGATRON, **layout}
    result = command(PPO, task.ppo(tmp_path / "run", **changes))
    finished(result)
    assert "UserWarning" not in result.out + result.err
    assert "16 sequences (16 for each 2 ranks, micro-batch 16)" in result.out
    for mine, theirs in zip(metrics(tmp_path / "run"), metrics(on_fsdp), strict=True):
        close(mine, theirs, 1e-3)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(on_fsdp / "export").state_dict().items():
        assert (exported[name] - tensor).abs().max() < 1e-3, name


def offloaded(section: str, *keys: str) -> dict[str, str]:
    """Of all roles that train, and the parameters of the reference."""
    trained = {f"{role}{section}__{key}": "true" for role in (ACTOR, "critic__") for key in keys}
    return {**trained, f"actor_rollout_ref__ref__{section}__param_offload": "true"}


def test_what_rests_on_the_host_changes_nothing(command: Preloaded, task: SmallTask, model: Path, on_fsdp, tmp_path):
    """Weight sync, checkpoint and export among it."""
    changes = offloaded("fsdp_config", "param_offload", "optimizer_offload")
    result = command(PPO, task.ppo(tmp_path / "run", actor_rollout_ref__model__path=model, **KL, **changes))
    finished(result)
    assert "actor: parameters and optimizer state in host memory between its phases, which saves nothing" in result.out
    for mine, theirs in zip(metrics(tmp_path / "run"), metrics(on_fsdp), strict=True):
        assert computed(mine) == computed(theirs)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(on_fsdp / "export").state_dict().items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.slow
def test_what_rests_on_the_host_changes_nothing_on_megatron(command: Preloaded, task: SmallTask, model: Path, tmp_path):
    changes = {"actor_rollout_ref__model__path": model, **KL, **MEGATRON, **PP2}
    away = offloaded("megatron", "param_offload", "optimizer_offload", "grad_offload")
    for run_dir, more in ((tmp_path / "stays", {}), (tmp_path / "rests", away)):
        finished(command(PPO, task.ppo(run_dir, **changes, **more)))
    for mine, theirs in zip(metrics(tmp_path / "rests"), metrics(tmp_path / "stays"), strict=True):
        assert computed(mine) == computed(theirs)


@pytest.fixture(scope="module")
def reward_model(command: Preloaded, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has learnt for some steps that digits are better than letters."""
    folder = tmp_path_factory.mktemp("rewards")
    rows = [{"prompt": f"{i:06d}=", "chosen": f"{i:03d}", "rejected": "abc"[i % 3] * 4} for i in range(128)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    keys = {
        "data.train_files": folder / "pairs.parquet",
        "data.train_batch_size": 16,
        "data.max_prompt_length": 7,
        "data.max_response_length": 7,
        "model.path": model,
        "optim.lr": 2e-3,
        "trainer.backend": "local",
        "trainer.device": "cpu",
        "trainer.default_local_dir": folder / "run",
    }
    finished(command("podium.trainer.main_rm", [f"{key}={value}" for key, value in keys.items()]))
    return folder / "run" / "export"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2], ids=["tp2", "pp2"])
def test_a_reward_model_on_megatron_scores_as_on_fsdp(
    command: Preloaded, task: SmallTask, model: Path, reward_model: Path, tmp_path, layout
):
    scored = {
        "actor_rollout_ref__model__path": model,
        "reward_model__enable": "true",
        "reward_model__model__path": reward_model,
        "custom_reward_function__path": None,
    }
    finished(command(PPO, task.ppo(tmp_path / "fsdp", **scored)))
    scored |= {"reward_model__strategy": "megatron", "reward_model__megatron__param_offload": "true"}
    finished(command(PPO, task.ppo(tmp_path / "megatron", **scored, **MEGATRON, **layout)))
    # Not the losses: with whitened advantages, the policy's is rounding about 0.
    names = (*(f"critic/score/{kind}" for kind in ("mean", "min", "max")), "actor/grad_norm", "critic/grad_norm")
    for mine, theirs in zip(steps(tmp_path / "megatron"), steps(tmp_path / "fsdp"), strict=True):
        assert mine["critic/score/min"] < mine["critic/score/max"]
        assert {name: mine[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2], ids=["tp2", "pp2"])
def test_ray_with_vllm(task: SmallTask, tmp_path, layout):
    changes = {f"{ROLLOUT}name": "vllm", "trainer__backend": "ray", **KL, **MEGATRON, **layout}
    finished(run(PPO, task.ppo(tmp_path / "run", **changes), timeout_s=600))
    on_policy(tmp_path / "run")
    for row in steps(tmp_path / "run"):
        assert row["weight_sync/version"] == row["step"]
