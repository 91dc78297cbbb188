"""Which roles a run has, and what is found out about the models beforehand."""

import json
import shutil

import pytest

from podium.trainer.config import PPOConfig, load_config
from podium.trainer.ppo.plan import make_plan
from podium.trainer.ppo.roles import build_roles, check_models
from podium.utils.errors import UserError
from podium.utils.tokenizer import load_tokenizer
from tests.models.tiny import save_tiny

ACTOR = "actor_rollout_ref__actor__"


def load(task, **changes) -> PPOConfig:
    return load_config(PPOConfig, task.ppo(task.model, **changes))[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["actor", "critic", "rollout"]),
        ({"algorithm__kl_ctrl__kl_coef": 0.1}, ["actor", "critic", "ref", "rollout"]),
        ({f"{ACTOR}use_kl_loss": "true"}, ["actor", "critic", "ref", "rollout"]),
        ({f"{ACTOR}use_kl_loss": "true", "actor_rollout_ref__model__lora_rank": 2}, ["actor", "critic", "rollout"]),
        ({"algorithm__adv_estimator": "grpo", "actor_rollout_ref__rollout__n": 2}, ["actor", "rollout"]),
    ],
)
def test_a_role_is_there_when_it_is_needed(task, changes, expected):
    config = load(task, **changes)
    roles = build_roles(config, make_plan(config, 256), load_tokenizer(str(task.model)))
    assert list(roles) == expected  # what is trained first, the rollout last


def test_roles_get_their_share_of_the_rows(task):
    config = load(
        task, trainer__n_gpus_per_node=2, actor_rollout_ref__rollout__n=3, **{f"{ACTOR}ppo_mini_batch_size": 8}
    )
    plan = make_plan(config, 256)
    roles = build_roles(config, plan, load_tokenizer(str(task.model)))
    assert roles["actor"].kwargs["mini_batch_rows"] == 12 == roles["critic"].kwargs["mini_batch_rows"]
    assert roles["actor"].kwargs["total_steps"] == plan.actor_updates == 6


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_entropy_has_a_gradient_only_where_it_counts(task, coefficient):
    config = load(task, **{f"{ACTOR}entropy_coeff": coefficient})
    roles = build_roles(config, make_plan(config, 256), load_tokenizer(str(task.model)))
    assert roles["actor"].kwargs["entropy_grad"] is (coefficient != 0)


def test_good_models_pass(task):
    check_models(load(task), "cpu")
    check_models(load(task, critic__model__path=task.model), "cpu")


def test_a_sequence_longer_than_the_model(task):
    check_models(load(task, data__max_prompt_length=121), "cpu")
    with pytest.raises(UserError, match=r"data.max_prompt_length=122 .* = 129 tokens, .* has 128 positions"):
        check_models(load(task, data__max_prompt_length=122), "cpu")


@pytest.mark.parametrize("key", ["actor_rollout_ref__model__path", "critic__model__path"])
def test_a_model_that_is_not_there(task, key):
    with pytest.raises(UserError, match=f"{key.replace('__', '.')}=/nowhere"):
        check_models(load(task, **{key: "/nowhere"}), "cpu")


def test_vllm_on_a_cpu_takes_heads_of_32(task, tmp_path):
    pytest.importorskip("vllm")
    shutil.copytree(task.model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    del config["head_dim"]  # then it is hidden size by heads
    file.write_text(json.dumps({**config, "num_attention_heads": 8, "num_key_value_heads": 8}))
    changes = {"actor_rollout_ref__model__path": file.parent, "actor_rollout_ref__rollout__name": "vllm"}
    with pytest.raises(UserError, match="head_dim is 16"):
        check_models(load(task, **changes), "cpu")
    check_models(load(task, **changes), "cuda")


def test_targets_of_lora_are_looked_for_in_the_model(task):
    for key in ("actor_rollout_ref__model", "critic__model"):
        check_models(load(task, **{f"{key}__lora_rank": 2, f"{key}__target_modules": "[q_proj]"}), "cpu")
        with pytest.raises(UserError, match=rf"{key.replace('__', '.')}.target_modules has query; the linear layers"):
            check_models(load(task, **{f"{key}__lora_rank": 2, f"{key}__target_modules": "[query]"}), "cpu")


def test_a_mixture_of_experts_takes_no_adapter_on_a_cpu(task, tmp_path):
    pytest.importorskip("vllm")
    changes = {
        "actor_rollout_ref__model__path": save_tiny("qwen3_moe", tmp_path),
        "actor_rollout_ref__model__lora_rank": 2,
        "actor_rollout_ref__rollout__name": "vllm",
    }
    check_models(load(task, **changes), "cpu")
    changes["actor_rollout_ref__rollout__weight_sync__adapter_only"] = "true"
    with pytest.raises(UserError, match="adapter_only=true: vLLM on a CPU runs no mixture of experts with an adapter"):
        check_models(load(task, **changes), "cpu")
    check_models(load(task, **changes), "cuda")
