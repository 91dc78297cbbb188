"""How a role's engine divides the ranks of a run: arithmetic only, done before anything starts."""

from typing import Any

from podium.models.megatron.parallel import MegatronLayout
from podium.trainer.config.shared import MegatronConfig
from podium.utils.errors import UserError


def data_parallel_size(role: str, strategy: str, megatron: MegatronConfig, ranks: int) -> int:
    """Shards into which the role's batches are cut: with FSDP one a rank, with Megatron one a copy of the model.

    Args:
        role: dotted key above the engine's section, for messages; empty at the top.

    Raises:
        UserError: the sizes do not go together, or the ranks do not divide into copies of the model.
    """
    if strategy != "megatron":
        return ranks
    try:
        return MegatronLayout.from_config(megatron).dp(ranks)
    except UserError as error:
        raise UserError(f"{role}.megatron: {error}".lstrip(".")) from None


def engine_name(strategy: str, megatron: MegatronConfig, lora_rank: int) -> str:
    """The engine with the sizes of its layout, and what it trains, as a plan prints it."""
    engine = f"megatron ({MegatronLayout.from_config(megatron)})" if strategy == "megatron" else strategy
    return f"{engine} with LoRA of rank {lora_rank}" if lora_rank else engine


_OFFLOAD = {"param_offload": "parameters", "optimizer_offload": "optimizer state", "grad_offload": "gradients"}


def offload_line(role: str, strategy: str, config: Any, device: str) -> str:
    """What of a role rests in host memory between its phases, as a plan prints it; empty where nothing does.

    Args:
        config: has the sections of the engines.
        device: ``cpu`` or ``cuda``.
    """
    section = config.megatron if strategy == "megatron" else config.fsdp_config
    parts = [what for key, what in _OFFLOAD.items() if getattr(section, key, False)]
    remark = ", which saves nothing on a CPU" if device == "cpu" else ""
    return f"{role}: {' and '.join(parts)} in host memory between its phases{remark}" if parts else ""
