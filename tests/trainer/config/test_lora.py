"""Keys of LoRA."""

import pytest

from podium.trainer.config import (
    GenerateConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    check_config,
    check_generate_config,
    check_rm_config,
    check_sft_config,
    load_config,
)
from podium.utils.errors import UserError

POLICY, CRITIC = "actor_rollout_ref.model.", "critic.model."
FILES = ["data.train_files=x", "data.val_files=x"]
ADAPTER_ONLY = "actor_rollout_ref.rollout.weight_sync.adapter_only=true"
KL = "algorithm.kl_ctrl.kl_coef=0.1"


def ppo(*argv: str) -> PPOConfig:
    config, explicit = load_config(PPOConfig, [*FILES, f"{POLICY}path=x", *argv])
    check_config(config, explicit)
    return config


def test_what_may_be_set():
    config = ppo(f"{POLICY}lora_rank=8", f"{POLICY}lora_alpha=32", f"{POLICY}target_modules=[q_proj,v_proj]", KL)
    assert config.actor_rollout_ref.model.target_modules == ["q_proj", "v_proj"]
    ppo(f"{POLICY}lora_rank=8", KL, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4")
    ppo(f"{CRITIC}lora_rank=8", f"{CRITIC}target_modules=all-linear")
    ppo(f"{POLICY}lora_rank=8", "critic.strategy=megatron")


REFUSED = {
    "alpha alone": (
        [f"{POLICY}lora_alpha=8"],
        "model.lora_alpha has no effect with actor_rollout_ref.model.lora_rank=0",
    ),
    "targets alone": (
        [f"{CRITIC}target_modules=[q_proj]"],
        "critic.model.target_modules has no effect with critic.model",
    ),
    "negative": ([f"{POLICY}lora_rank=-1"], "lora_rank=-1: expected at least 0"),
    "alpha": ([f"{POLICY}lora_rank=1", f"{POLICY}lora_alpha=0"], "lora_alpha=0: expected at least 1"),
    "megatron": (
        [f"{POLICY}lora_rank=8", "actor_rollout_ref.actor.strategy=megatron"],
        "actor_rollout_ref.model.lora_rank=8 with actor_rollout_ref.actor.strategy=megatron: adapters are trained by",
    ),
    "critic on megatron": (
        [f"{CRITIC}lora_rank=8", "critic.strategy=megatron"],
        "critic.model.lora_rank=8 with critic.strategy=megatron",
    ),
    "a reference of its own": (
        [f"{POLICY}lora_rank=8", KL, "actor_rollout_ref.ref.fsdp_config.dtype=bfloat16"],
        "ref.fsdp_config.dtype has no effect with actor_rollout_ref.model.lora_rank: the reference is the actor's own",
    ),
    "no adapter to send": ([ADAPTER_ONLY], "adapter_only=true: there is no adapter with"),
    "merged weights only": (
        [f"{POLICY}lora_rank=8", ADAPTER_ONLY, "actor_rollout_ref.rollout.name=hf"],
        "adapter_only=true: rollout.name=hf takes merged weights only",
    ),
    "too large a rank": ([f"{POLICY}lora_rank=513", ADAPTER_ONLY], "vLLM takes ranks up to 512"),
    "the head": (
        [f"{POLICY}lora_rank=8", f"{POLICY}target_modules=[lm_head]", ADAPTER_ONLY],
        "lm_head .* merged weights",
    ),
    "another base": (
        [f"{POLICY}lora_rank=8", ADAPTER_ONLY, "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"],
        "the rollout reads the base itself, in float32; the actor's is rounded by",
    ),
    "verl's": ([f"{POLICY}exclude_modules=[q_proj]"], "list what to adapt in target_modules"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    argv, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        ppo(*argv)


@pytest.mark.parametrize(("kind", "check"), [(SFTConfig, check_sft_config), (RMConfig, check_rm_config)])
def test_supervised(kind: type, check):
    def load(*argv: str) -> None:
        check(*load_config(kind, [*FILES, "model.path=x", *argv]))

    load("model.lora_rank=8", "trainer.seed=3")
    for argv, message in (
        (["model.lora_alpha=8"], "model.lora_alpha has no effect with model.lora_rank=0"),
        (["model.lora_rank=8", "strategy=megatron"], "model.lora_rank=8 with strategy=megatron"),
        (["trainer.seed=3"], "trainer.seed has no effect with model.lora_rank=0"),
    ):
        with pytest.raises(UserError, match=message):
            load(*argv)


def test_generation_has_none():
    argv = ["data.path=x", "data.output_path=y.parquet", "model.path=x", "model.lora_rank=8"]
    with pytest.raises(UserError, match=r"model\.lora_rank has no effect without a trainer"):
        check_generate_config(*load_config(GenerateConfig, argv))
