"""Keys of the training engines."""

import pytest

from podium.trainer.config import PPOConfig, SFTConfig, check_config, check_sft_config, load_config
from podium.utils.errors import UserError

ACTOR, CRITIC, REF = "actor_rollout_ref.actor.", "critic.", "actor_rollout_ref.ref."
ON_MEGATRON = [f"{ACTOR}strategy=megatron", f"{CRITIC}strategy=megatron"]
TP2 = f"{ACTOR}megatron.tensor_model_parallel_size=2"
REQUIRED = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x"]


def load(*argv: str) -> PPOConfig:
    config, explicit = load_config(PPOConfig, [*REQUIRED, *argv])
    check_config(config, explicit)
    return config


def test_what_is_not_set_is_as_for_the_actor():
    config = load(*ON_MEGATRON, TP2, f"{CRITIC}megatron.dtype=bfloat16", "algorithm.kl_ctrl.kl_coef=0.1")
    assert config.critic.megatron.tensor_model_parallel_size == 2
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2
    assert (config.critic.megatron.dtype, config.actor_rollout_ref.actor.megatron.dtype) == ("bfloat16", "float32")


def test_one_role_may_stay_on_fsdp():
    load(f"{ACTOR}strategy=megatron", TP2, f"{CRITIC}fsdp_config.dtype=bfloat16")
    load(f"{CRITIC}strategy=megatron", f"{CRITIC}megatron.tensor_model_parallel_size=2")


def test_what_rests_on_the_host_is_for_each_role_to_say():
    offload = [f"{ACTOR}megatron.{key}_offload=true" for key in ("param", "optimizer", "grad")]
    config = load(*ON_MEGATRON, TP2, *offload, f"{CRITIC}megatron.param_offload=false")
    assert config.actor_rollout_ref.actor.megatron.param_offload and not config.critic.megatron.param_offload
    load(*(f"{role}fsdp_config.param_offload=true" for role in (ACTOR, CRITIC)))


REFUSED = {
    "megatron with fsdp": ([TP2], "actor.megatron.tensor_model_parallel_size has no effect with .*strategy=fsdp"),
    "fsdp with megatron": (
        [f"{ACTOR}strategy=megatron", f"{ACTOR}fsdp_config.dtype=bfloat16"],
        "actor.fsdp_config.dtype has no effect with actor_rollout_ref.actor.strategy=megatron",
    ),
    "ref's fsdp with megatron": (
        [f"{ACTOR}strategy=megatron", f"{REF}fsdp_config.dtype=bfloat16", "algorithm.kl_ctrl.kl_coef=0.1"],
        "ref.fsdp_config.dtype has no effect with actor_rollout_ref.actor.strategy=megatron",
    ),
    "critic's megatron with fsdp": (
        [f"{CRITIC}megatron.tensor_model_parallel_size=2"],
        "critic.megatron.tensor_model_parallel_size has no effect with critic.strategy=fsdp",
    ),
    "sequence parallel alone": (
        [*ON_MEGATRON, f"{ACTOR}megatron.sequence_parallel=true"],
        "sequence_parallel has no effect with .*tensor_model_parallel_size=1",
    ),
    "interleaving alone": (
        [*ON_MEGATRON, f"{ACTOR}megatron.virtual_pipeline_model_parallel_size=2"],
        "virtual_pipeline_model_parallel_size has no effect with .*pipeline_model_parallel_size=1",
    ),
    "two layouts": (
        [*ON_MEGATRON, TP2, f"{CRITIC}megatron.tensor_model_parallel_size=1"],
        "critic.megatron.tensor_model_parallel_size=1, but actor_rollout_ref.actor.*=2: the roles of one process",
    ),
    "size": (
        [*ON_MEGATRON, f"{ACTOR}megatron.context_parallel_size=0"],
        "context_parallel_size=0: expected at least 1",
    ),
    "the optimizer of a frozen model": (
        [*ON_MEGATRON, f"{REF}megatron.optimizer_offload=true", "algorithm.kl_ctrl.kl_coef=0.1"],
        "ref.megatron.optimizer_offload has no effect for a model that is not trained",
    ),
    "the optimizer of a reward model": (
        ["reward_model.enable=true", "reward_model.model.path=x", "reward_model.fsdp_config.optimizer_offload=true"],
        "reward_model.fsdp_config.optimizer_offload has no effect for a model that is not trained",
    ),
    "engine": ([f"{ACTOR}strategy=deepspeed"], "strategy=deepspeed: expected fsdp or megatron"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str):
    argv, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        load(*argv)


def test_supervised_training_has_the_same_engines():
    for argv in (["strategy=megatron", "megatron.tensor_model_parallel_size=2"], ["fsdp_config.dtype=bfloat16"]):
        check_sft_config(*load_config(SFTConfig, argv))
    for argv in (["strategy=megatron", "fsdp_config.dtype=bfloat16"], ["megatron.tensor_model_parallel_size=2"]):
        with pytest.raises(UserError, match="has no effect with strategy="):
            check_sft_config(*load_config(SFTConfig, argv))
