"""The configuration of `podium.trainer.main_rm`."""

from dataclasses import dataclass, field
from typing import Any

from podium.trainer.config.sft import SFTTrainerConfig
from podium.trainer.config.shared import ChatConfig, FSDPConfig, MegatronConfig, ModelConfig, OptimConfig


@dataclass
class RMDataConfig(ChatConfig):
    train_files: Any = ""
    """Parquet or JSON-lines file, or a list of them. Required."""
    val_files: Any = None
    """As train_files; null skips validation."""
    prompt_key: str | None = "prompt"
    """Column with the prompt; null: both responses are whole conversations."""
    chosen_key: str = "chosen"
    """Column with the better response: a string, or a chat list that ends with it."""
    rejected_key: str = "rejected"
    """Column with the worse response, likewise."""
    margin_key: str | None = None
    """Column with the number by which the better response should score higher; null is 0."""
    max_prompt_length: int = 512
    """Tokens."""
    max_response_length: int = 512
    """Tokens, end-of-sequence included."""
    truncation: str = "error"
    """What to do with an overlong row: error | left | right | middle."""
    train_batch_size: int = 64
    """Pairs in one optimizer step, over all ranks."""
    micro_batch_size_per_gpu: int | None = None
    """Pairs in one forward and backward on one rank; null takes train_batch_size over the ranks."""
    shuffle: bool = True
    """New order each epoch, from seed."""
    seed: int = 1
    """Seeds the order of the data."""


@dataclass
class RMConfig:
    data: RMDataConfig = field(default_factory=RMDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    strategy: str = "fsdp"
    """Training engine: fsdp | megatron."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
