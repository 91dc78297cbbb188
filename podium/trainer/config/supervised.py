"""What the configurations of supervised fine-tuning and of reward models share."""

from dataclasses import dataclass, field
from typing import Any

from podium.trainer.config.shared import (
    ChatConfig,
    CheckpointConfig,
    FSDPConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    SupervisedDeadlinesConfig,
    TrackingConfig,
    WorkersConfig,
)


@dataclass
class SupervisedDataConfig(ChatConfig):
    train_files: Any = ""
    """Parquet or JSON-lines file, or a list of them. Required."""
    val_files: Any = None
    """As train_files; null skips validation."""
    max_prompt_length: int = 512
    """Tokens."""
    max_response_length: int = 512
    """Tokens, end-of-sequence included."""
    truncation: str = "error"
    """What to do with an overlong row: error | left | right | middle."""
    shuffle: bool = True
    """New order each epoch, from seed."""
    seed: int = 1
    """Seeds the order of the data."""


@dataclass
class SupervisedTrainerConfig(WorkersConfig, CheckpointConfig, TrackingConfig):
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Optimizer steps; null follows from total_epochs."""
    test_freq: int = -1
    """Steps between validations; -1 validates at the end only."""
    log_freq: int = 1
    """Steps between log lines."""
    seed: int = 0
    """LoRA: draws the adapters."""
    deadlines: SupervisedDeadlinesConfig = field(default_factory=SupervisedDeadlinesConfig)


@dataclass
class SupervisedConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    strategy: str = "fsdp"
    """Training engine: fsdp | megatron."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    trainer: SupervisedTrainerConfig = field(default_factory=SupervisedTrainerConfig)
