"""The configuration of `podium.trainer.main_sft`."""

from dataclasses import dataclass, field

from podium.trainer.config.supervised import SupervisedConfig, SupervisedDataConfig


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    prompt_key: str = "prompt"
    """Column with the prompt."""
    response_key: str = "response"
    """Column with the answer to learn."""
    messages_key: str | None = None
    """Column with whole conversations, in place of prompt_key and response_key; the assistant's turns are learnt."""
    max_length: int = 1024
    """messages_key: tokens of a conversation."""
    packing: bool = False
    """Put several training documents into a row of max_length (or max_prompt_length + max_response_length) tokens."""
    train_batch_size: int = 128
    """Rows in one optimizer step, over all ranks; with packing, rows of several documents."""
    micro_batch_size_per_gpu: int | None = None
    """Rows in one forward and backward on one rank; null takes train_batch_size over the ranks."""


@dataclass
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
