"""Where the rollout and the reward model run: what of it goes together."""

from podium.trainer.config.reward import RewardModelConfig
from podium.trainer.config.rollout import GenerationConfig, RolloutConfig
from podium.utils.errors import UserError

_TRANSPORTS = {"process": ("colocated", "memory_buffer"), "device": ("ipc", "broadcast"), "apart": ("ipc", "broadcast")}
"""Of the transports that depend on where the processes are, those that connect a placement."""


def rollout_ranks(rollout: RolloutConfig, trainer_ranks: int) -> int:
    """Ranks of the rollout.

    Raises:
        UserError: they are not named, or do not divide into copies of the model.
    """
    key = "actor_rollout_ref.rollout"
    ranks = trainer_ranks
    if rollout.placement == "apart":
        if rollout.n_gpus_per_node is None:
            raise UserError(f"{key}.n_gpus_per_node is not set: with {key}.placement=apart, its ranks on each node")
        ranks = rollout.nnodes * rollout.n_gpus_per_node
    check_tensor_parallel(rollout, key, ranks)
    return ranks


def reward_ranks(model: RewardModelConfig) -> int:
    """Ranks of its own that the reward model has; 0 where it runs in the trainer's processes, or there is none.

    Raises:
        UserError: they are not named.
    """
    if not (model.enable and model.enable_resource_pool):
        return 0
    if model.n_gpus_per_node is None:
        raise UserError(
            "reward_model.n_gpus_per_node is not set: with enable_resource_pool=true, the ranks it has on each node"
        )
    return model.nnodes * model.n_gpus_per_node


def check_tensor_parallel(rollout: GenerationConfig, key: str, ranks: int) -> None:
    """Refuses copies of the model that the engine cannot make, or the ranks do not divide into."""
    tp = rollout.tensor_model_parallel_size
    if tp > 1 and rollout.name == "hf":
        raise UserError(f"{key}.tensor_model_parallel_size={tp}: {key}.name=hf keeps whole models; use vllm, or 1")
    if ranks % tp:
        raise UserError(f"{key}.tensor_model_parallel_size={tp} does not divide the rollout's {ranks} rank(s)")


def check_transport(rollout: RolloutConfig, strategy: str) -> None:
    """Refuses a transport that cannot connect actor and rollout as they are placed, with the actor's `strategy`."""
    key, transport = "actor_rollout_ref.rollout", rollout.weight_sync.transport
    placed = {name for names in _TRANSPORTS.values() for name in names}
    if transport in placed and transport not in _TRANSPORTS[rollout.placement]:
        raise UserError(
            f"{key}.weight_sync.transport={transport} does not connect {key}.placement={rollout.placement}: "
            f"use auto or {' or '.join(_TRANSPORTS[rollout.placement])}"
        )
    if transport == "memory_buffer" and strategy != "megatron":
        raise UserError(
            f"{key}.weight_sync.transport=memory_buffer moves the stages of a Megatron actor, and "
            f"actor_rollout_ref.actor.strategy is {strategy}: use auto or colocated"
        )


def placement_rules(rollout: RolloutConfig, prefix: str) -> list[tuple[str, str]]:
    """Keys without effect, and why."""
    if rollout.placement == "apart":
        return [(f"{prefix}.free_cache_engine", f"with {prefix}.placement=apart: the trainer is on other devices")]
    alone = [] if rollout.placement == "device" else [(f"{prefix}.max_restarts", f"with {prefix}.placement=process")]
    return alone + [(f"{prefix}.{leaf}", f"without {prefix}.placement=apart") for leaf in ("nnodes", "n_gpus_per_node")]
