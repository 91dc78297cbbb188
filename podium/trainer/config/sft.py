"""The configuration of `podium.trainer.main_sft`."""

from dataclasses import dataclass, field
from typing import Any

from podium.trainer.config.shared import (
    ChatConfig,
    CheckpointConfig,
    FSDPConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    TrackingConfig,
)


@dataclass
class SFTDataConfig(ChatConfig):
    train_files: Any = ""
    """Parquet or JSON-lines file, or a list of them. Required."""
    val_files: Any = None
    """As train_files; null skips validation."""
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
    max_prompt_length: int = 512
    """Tokens."""
    max_response_length: int = 512
    """Tokens, end-of-sequence included."""
    truncation: str = "error"
    """What to do with an overlong row: error | left | right | middle."""
    train_batch_size: int = 128
    """Rows in one optimizer step, over all ranks; with packing, rows of several documents."""
    micro_batch_size_per_gpu: int | None = None
    """Rows in one forward and backward on one rank; null takes train_batch_size over the ranks."""
    shuffle: bool = True
    """New order each epoch, from seed."""
    seed: int = 1
    """Seeds the order of the data."""


@dataclass
class SFTTrainerConfig(CheckpointConfig, TrackingConfig):
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Optimizer steps; null follows from total_epochs."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Ranks on each machine: GPUs, or processes on a CPU machine."""
    device: str = "auto"
    """auto | cpu | cuda."""
    backend: str = "ray"
    """Who runs the workers: ray | local."""
    test_freq: int = -1
    """Steps between validations; -1 validates at the end only."""
    log_freq: int = 1
    """Steps between log lines."""
    seed: int = 0
    """Seeds the model."""
    rpc_timeout_s: float = 1800.0
    """Longest that one call to the workers may take before the run stops and names who is late."""


@dataclass
class SFTConfig:
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    strategy: str = "fsdp"
    """Training engine: fsdp | megatron."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
