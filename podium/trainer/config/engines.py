"""Keys of the training engines: which have an effect, and which layouts go together."""

from dataclasses import fields

from podium.trainer.config.ppo import PPOConfig
from podium.trainer.config.shared import MegatronConfig
from podium.utils.errors import UserError

# What only tells one model from another: layouts may differ in them.
_OF_THE_MODEL = ("dtype", "use_remove_padding", "param_offload", "optimizer_offload", "grad_offload")

Rules = list[tuple[str, str]]


def ppo_engine_rules(config: PPOConfig) -> Rules:
    """Keys of all roles' engines that have no effect, and why."""
    actor, critic, model = config.actor_rollout_ref.actor, config.critic, config.reward_model
    strategy = "actor_rollout_ref.actor.strategy"
    return [
        *engine_rules("actor_rollout_ref.actor", strategy, actor.strategy, actor.megatron, MegatronConfig()),
        *engine_rules(
            "actor_rollout_ref.ref", strategy, actor.strategy, config.actor_rollout_ref.ref.megatron, actor.megatron
        ),
        *engine_rules("critic", "critic.strategy", critic.strategy, critic.megatron, actor.megatron),
        *engine_rules("reward_model", "reward_model.strategy", model.strategy, model.megatron, actor.megatron),
        *(
            (f"{role}.{section}.{leaf}", "for a model that is not trained")
            for role in ("actor_rollout_ref.ref", "reward_model")
            for section in ("fsdp_config", "megatron")
            for leaf in ("optimizer_offload", "grad_offload")
        ),
    ]


def engine_rules(role: str, strategy_key: str, strategy: str, megatron: MegatronConfig, unset: MegatronConfig) -> Rules:
    """Keys of one role's engines that have no effect, and why.

    Args:
        role: dotted key above the sections; empty at the top.
        unset: what `megatron` holds where the user set nothing.
    """
    prefix = f"{role}." if role else ""
    if strategy != "megatron":
        changed = [f.name for f in fields(MegatronConfig) if getattr(megatron, f.name) != getattr(unset, f.name)]
        return [(f"{prefix}megatron.{name}", f"with {strategy_key}={strategy}") for name in changed]
    rules = [(f"{prefix}fsdp_config", f"with {strategy_key}=megatron")]
    if megatron.tensor_model_parallel_size == 1 and megatron.sequence_parallel:
        rules.append((f"{prefix}megatron.sequence_parallel", f"with {prefix}megatron.tensor_model_parallel_size=1"))
    if megatron.pipeline_model_parallel_size == 1:
        why = f"with {prefix}megatron.pipeline_model_parallel_size=1"
        leaves = ("virtual_pipeline_model_parallel_size", "pipeline_stage_layers")
        rules += [(f"{prefix}megatron.{leaf}", why) for leaf in leaves if getattr(megatron, leaf) is not None]
    return rules


def check_layouts(config: PPOConfig) -> None:
    """Roles that share processes share megatron-core's process groups.

    Raises:
        UserError: two roles ask for different ones.
    """
    actor = config.actor_rollout_ref.actor
    sections = {
        "actor_rollout_ref.actor": (actor.strategy, actor.megatron),
        "actor_rollout_ref.ref": (actor.strategy, config.actor_rollout_ref.ref.megatron),
        "critic": (config.critic.strategy, config.critic.megatron),
    }
    if not config.reward_model.enable_resource_pool:
        sections["reward_model"] = (config.reward_model.strategy, config.reward_model.megatron)
    on_megatron = [(role, megatron) for role, (strategy, megatron) in sections.items() if strategy == "megatron"]
    for role, megatron in on_megatron[1:]:
        first, other = on_megatron[0]
        for field in fields(MegatronConfig):
            mine, theirs = getattr(megatron, field.name), getattr(other, field.name)
            if field.name not in _OF_THE_MODEL and mine != theirs:
                raise UserError(
                    f"{role}.megatron.{field.name}={mine}, but {first}.megatron.{field.name}={theirs}: the roles of "
                    "one process share one Megatron layout; leave the first unset, or set both alike"
                )
