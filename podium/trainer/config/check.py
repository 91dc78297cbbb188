"""Keys that are legal but wrong: values outside their choices, and keys that the chosen mode would ignore."""

from typing import Any

from podium.trainer.config.methods import check_methods, method_rules
from podium.trainer.config.ppo import PPOConfig
from podium.utils.errors import UserError

_CHOICES = {
    "actor_rollout_ref.rollout.name": ("vllm", "hf"),
    "actor_rollout_ref.rollout.dtype": ("float32", "bfloat16"),
    "actor_rollout_ref.rollout.weight_sync.transport": ("auto", "colocated"),
    "actor_rollout_ref.rollout.weight_sync.verify": ("off", "sample", "full"),
    "actor_rollout_ref.actor.strategy": ("fsdp",),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": ("float32", "bfloat16"),
    "actor_rollout_ref.actor.fsdp_config.dtype": ("float32", "bfloat16"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("constant", "cosine", "linear"),
    "actor_rollout_ref.ref.fsdp_config.model_dtype": ("float32", "bfloat16"),
    "actor_rollout_ref.ref.fsdp_config.dtype": ("float32", "bfloat16"),
    "critic.strategy": ("fsdp",),
    "critic.fsdp_config.model_dtype": ("float32", "bfloat16"),
    "critic.fsdp_config.dtype": ("float32", "bfloat16"),
    "critic.optim.lr_scheduler_type": ("constant", "cosine", "linear"),
    "data.truncation": ("error", "left", "right", "middle"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.backend": ("ray", "local"),
}


def check_config(config: PPOConfig, explicit: set[str]) -> None:
    """Refuses what cannot be meant.

    Args:
        explicit: the keys that the user set.

    Raises:
        UserError: names the key and what to do.
    """
    for key, choices in _CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            raise UserError(f"{key}={value}: expected {' or '.join(choices)}")
    for key, minimum in (("data.train_batch_size", 1), ("data.max_prompt_length", 1), ("data.max_response_length", 1)):
        if _get(config, key) < minimum:
            raise UserError(f"{key}={_get(config, key)}: expected at least {minimum}")
    if config.actor_rollout_ref.rollout.temperature <= 0:
        raise UserError(
            f"actor_rollout_ref.rollout.temperature={config.actor_rollout_ref.rollout.temperature}: training needs "
            "sampled responses, so it must be above 0 (val_kwargs.temperature=0 is greedy validation)"
        )
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if tp != 1:
        raise UserError(f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}: only 1 is supported so far")
    check_methods(config)
    for prefix, reason in [*method_rules(config), *_without_effect(config)]:
        ignored = sorted(key for key in explicit if key == prefix or key.startswith(prefix + "."))
        if ignored:
            raise UserError(f"{ignored[0]} has no effect {reason}: remove it")


def _without_effect(config: PPOConfig) -> list[tuple[str, str]]:
    """Keys (or parents of keys) that this configuration never reads, and why."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    rules = []
    if algorithm.use_kl_in_reward is False:
        why = "with algorithm.use_kl_in_reward=false"
        rules += [("algorithm.kl_ctrl", why), ("algorithm.kl_penalty", why)]
    in_reward = algorithm.use_kl_in_reward or (algorithm.use_kl_in_reward is None and algorithm.kl_ctrl.kl_coef > 0)
    if not in_reward and not actor.use_kl_loss:
        rules.append(("actor_rollout_ref.ref", "without a KL (algorithm.kl_ctrl.kl_coef or actor.use_kl_loss)"))
    if not actor.use_kl_loss:
        why = "without actor_rollout_ref.actor.use_kl_loss=true"
        rules += [(f"actor_rollout_ref.actor.{leaf}", why) for leaf in ("kl_loss_coef", "kl_loss_type")]
    if config.actor_rollout_ref.rollout.name == "hf":
        leaves = ("gpu_memory_utilization", "enforce_eager")
        rules += [(f"actor_rollout_ref.rollout.{leaf}", "with rollout.name=hf") for leaf in leaves]
    if config.custom_reward_function.path is None:
        rules.append(("custom_reward_function", "without custom_reward_function.path"))
    if not config.data.shuffle:
        rules.append(("data.seed", "with data.shuffle=false"))
    return rules


def _get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config
