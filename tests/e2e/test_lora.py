"""Training adapters by command: the policy under PPO, then what becomes of its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.commands import PPO, SFT, Preloaded
from tests.e2e.test_ppo import on_policy, steps
from tests.e2e.test_resume import ALGORITHMS, COMMON, SHORT, finished, kill_and_go_on, refused, same, tensor_data
from tests.small_task import SmallTask

POLICY = "actor_rollout_ref__model__"
ROLLOUT = "actor_rollout_ref__rollout__"
ADAPTER_ONLY = f"{ROLLOUT}weight_sync__adapter_only"
LORA = {f"{POLICY}lora_rank": 4, f"{POLICY}lora_alpha": 32, "algorithm__kl_ctrl__kl_coef": 0.01}
TWO_STEPS = {"trainer__total_training_steps": 2, "actor_rollout_ref__actor__optim__lr": 1e-2}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)


WAYS = [
    ({}, 1),
    pytest.param({f"{ROLLOUT}name": "vllm", "trainer__backend": "ray"}, 1, marks=pytest.mark.slow),
    pytest.param({f"{ROLLOUT}name": "vllm"}, 2, marks=pytest.mark.slow),
    pytest.param({f"{ROLLOUT}name": "vllm", ADAPTER_ONLY: "true"}, 1, marks=pytest.mark.slow),
    pytest.param(
        {f"{ROLLOUT}name": "vllm", ADAPTER_ONLY: "true", f"{ROLLOUT}tensor_model_parallel_size": 2},
        2,
        marks=pytest.mark.slow,
    ),
    pytest.param({f"{ROLLOUT}placement": "device"}, 2, marks=pytest.mark.slow),
    pytest.param({f"{ROLLOUT}weight_sync__transport": "cpu"}, 2, marks=pytest.mark.slow),
    pytest.param({f"{ROLLOUT}weight_sync__transport": "sharded"}, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("changes", "ranks"), WAYS)
def test_ppo(command: Preloaded, task: SmallTask, tmp_path: Path, changes: dict[str, Any], ranks: int):
    """On-policy steps, then the run's export, the adapter beside it, and `podium export` of the checkpoint agree."""
    run_dir = tmp_path / "run"
    changes = changes | LORA | TWO_STEPS | {"critic__model__lora_rank": 2, "trainer__n_gpus_per_node": ranks}
    result = command(PPO, task.ppo(run_dir, **changes), timeout_s=300)
    finished(result)
    assert "actor, critic, ref (the actor's base)" in result.out
    on_policy(run_dir)
    rows = steps(run_dir)
    assert rows[0]["actor/reward_kl_penalty"] == 0.0, "at first the policy is its base"
    assert rows[1]["actor/reward_kl_penalty"] != 0.0
    assert all(row["weight_sync/verified_buckets"] > 0 for row in rows)

    whole = sum(parameter.nbytes for parameter in tensors(task.model).values())
    assert all((row["weight_sync/bytes"] < whole * ranks / 8) == (ADAPTER_ONLY in changes) for row in rows)

    merged = tensors(run_dir / "export")
    assert difference(merged, tensors(task.model)) > 1e-3
    base = AutoModelForCausalLM.from_pretrained(task.model)
    adapted = PeftModel.from_pretrained(base, run_dir / "export" / "lora_adapter").merge_and_unload()
    assert difference(merged, dict(adapted.named_parameters())) < 1e-6

    finished(command("podium", ["export", str(run_dir), str(tmp_path / "out"), "--check"]))
    ours, theirs = (folder / "model.safetensors" for folder in (tmp_path / "out", run_dir / "export"))
    assert tensor_data(ours) == tensor_data(theirs)
    ours, theirs = (f / "lora_adapter" / "adapter_model.safetensors" for f in (tmp_path / "out", run_dir / "export"))
    assert tensor_data(ours) == tensor_data(theirs)
    finished(command("podium", ["export", str(run_dir), str(tmp_path / "critic"), "--role", "critic", "--check"]))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_anywhere_a_run_ends_where_it_would_have(
    command: Preloaded, task: SmallTask, tmp_path: Path, ranks: int
):
    changes = COMMON | ALGORITHMS["ppo"] | {f"{POLICY}lora_rank": 4, "critic__model__lora_rank": 4}
    changes |= {"trainer__n_gpus_per_node": ranks}
    straight, run_dir = tmp_path / "straight", tmp_path / "killed"
    finished(command(PPO, task.ppo(straight, **changes), timeout_s=600))
    kill_and_go_on(command, PPO, task.ppo(run_dir, **changes), SHORT)
    same(straight, run_dir)


def test_sft_then_what_is_wrong(command: Preloaded, task: SmallTask, tmp_path: Path):
    changes = {"model__lora_rank": 8, "model__enable_gradient_checkpointing": "true", "optim__lr": 1e-2}
    changes |= {"data__micro_batch_size_per_gpu": 12, "trainer__save_freq": 2}
    finished(command(SFT, task.sft(tmp_path / "sft", **changes)))
    rows = steps(tmp_path / "sft")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.02
    export = tmp_path / "sft" / "export"
    assert difference(tensors(export), tensors(task.model)) > 1e-3
    finished(command("podium", ["export", str(tmp_path / "sft"), str(tmp_path / "out"), "--check"]))
    assert tensor_data(tmp_path / "out" / "model.safetensors") == tensor_data(export / "model.safetensors")

    refused(
        command(SFT, task.sft(tmp_path / "x", model__lora_rank=8, model__target_modules="[q_proj,query]")), "down_proj"
    )
    refused(command(PPO, task.ppo(tmp_path / "x", **{f"{POLICY}lora_alpha": 8})), "has no effect", "lora_rank=0")
    refused(
        command(PPO, task.ppo(tmp_path / "x", critic__model__lora_rank=2, critic__model__target_modules="query")),
        "query",
    )
