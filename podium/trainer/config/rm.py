"""The configuration of `podium.trainer.main_rm`."""

from dataclasses import dataclass, field

from podium.trainer.config.supervised import SupervisedConfig, SupervisedDataConfig


@dataclass
class RMDataConfig(SupervisedDataConfig):
    prompt_key: str | None = "prompt"
    """Column with the prompt; null: both responses are whole conversations."""
    chosen_key: str = "chosen"
    """Column with the better response: a string, or a chat list that ends with it."""
    rejected_key: str = "rejected"
    """Column with the worse response, likewise."""
    margin_key: str | None = None
    """Column with the number by which the better response should score higher; null is 0."""
    train_batch_size: int = 64
    """Pairs in one optimizer step, over all ranks."""
    micro_batch_size_per_gpu: int | None = None
    """Pairs in one forward and backward on one rank; null takes train_batch_size over the ranks."""


@dataclass
class RMConfig(SupervisedConfig):
    data: RMDataConfig = field(default_factory=RMDataConfig)
