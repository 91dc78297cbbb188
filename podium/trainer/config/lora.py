"""Keys of LoRA: which go together, and which have no effect."""

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
