"""Keys of LoRA: which go together, and which have no effect."""

from podium.trainer.config.ppo import ActorRolloutRefConfig
from podium.trainer.config.shared import LoRAConfig
from podium.utils.errors import UserError


def lora_rules(model: LoRAConfig, key: str, strategy: str, strategy_key: str) -> list[tuple[str, str]]:
    """Keys of the section `key` that have no effect, and why.

    Raises:
        UserError: the training engine cannot train adapters.
    """
    if not model.lora_rank:
        return [(f"{key}.{leaf}", f"with {key}.lora_rank=0") for leaf in ("lora_alpha", "target_modules")]
    if strategy != "fsdp":
        raise UserError(
            f"{key}.lora_rank={model.lora_rank} with {strategy_key}={strategy}: adapters are trained by the fsdp "
            "engine only; remove one of the two"
        )
    return []


# What vLLM has room for.
_MAX_ROLLOUT_RANK = 512


def check_adapter_only(policy: ActorRolloutRefConfig) -> None:
    """Refuses an adapter that the rollout cannot apply to weights of its own.

    Raises:
        UserError: says which key does not go with it.
    """
    model, rollout = policy.model, policy.rollout
    if not rollout.weight_sync.adapter_only:
        return
    key = "actor_rollout_ref.rollout.weight_sync.adapter_only=true"
    model_dtype = policy.actor.fsdp_config.model_dtype
    targets = model.target_modules if isinstance(model.target_modules, list) else [model.target_modules]
    for fits, problem in (
        (model.lora_rank > 0, "there is no adapter with actor_rollout_ref.model.lora_rank=0"),
        (
            model.lora_rank <= _MAX_ROLLOUT_RANK,
            f"vLLM takes ranks up to {_MAX_ROLLOUT_RANK}, actor_rollout_ref.model.lora_rank={model.lora_rank}",
        ),
        (rollout.name == "vllm", f"rollout.name={rollout.name} takes merged weights only; use vllm"),
        (
            "lm_head" not in targets,
            "lm_head in actor_rollout_ref.model.target_modules is for merged weights only",
        ),
        (
            model_dtype == "float32" or rollout.dtype == "bfloat16",
            f"the rollout reads the base itself, in {rollout.dtype}; the actor's is rounded by "
            f"actor_rollout_ref.actor.fsdp_config.model_dtype={model_dtype}",
        ),
    ):
        if not fits:
            raise UserError(f"{key}: {problem}")
