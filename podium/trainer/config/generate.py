"""The configurations of `podium.trainer.main_generate` and `podium.trainer.main_eval`."""

from dataclasses import dataclass, field
from typing import Any

from podium.trainer.config.reward import RewardFunctionConfig, ScoringConfig
from podium.trainer.config.rollout import RolloutConfig
from podium.trainer.config.shared import ChatConfig, DeadlinesConfig, ModelConfig, WorkersConfig


@dataclass
class GenerateDataConfig(ChatConfig):
    path: Any = ""
    """Parquet or JSON-lines file with prompts, or a list of them. Required."""
    output_path: str = ""
    """Parquet file to write: the columns of the input, and responses (a list of rollout.n strings). Required."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string or a chat list."""
    max_prompt_length: int = 512
    """Tokens."""
    max_response_length: int = 512
    """Tokens, end-of-sequence included."""
    truncation: str = "error"
    """What to do with an overlong prompt: error | left | right | middle."""
    batch_size: int = 256
    """Prompts answered together; what a killed run loses at most."""


@dataclass
class GenerateDeadlinesConfig(DeadlinesConfig):
    generate_s: float | None = None
    """Seconds for the responses of a batch."""


@dataclass
class GenerateTrainerConfig(WorkersConfig):
    seed: int = 0
    """Seeds the sampling; each response has a seed of its own."""
    deadlines: GenerateDeadlinesConfig = field(default_factory=GenerateDeadlinesConfig)


@dataclass
class GenerateConfig:
    data: GenerateDataConfig = field(default_factory=GenerateDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: GenerateTrainerConfig = field(default_factory=GenerateTrainerConfig)


@dataclass
class EvalDataConfig:
    path: Any = ""
    """Parquet or JSON-lines file with responses, as main_generate writes it, or a list of them. Required."""
    response_key: str = "responses"
    """Column with a response or a list of them."""
    output_path: str | None = None
    """Parquet file to write: the columns of the input, and scores (a list, null where there is none)."""


@dataclass
class EvalConfig:
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    custom_reward_function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    reward_model: ScoringConfig = field(default_factory=ScoringConfig)
    pass_threshold: float = 1.0
    """A response passes when it scores at least this."""
    pass_k: list[int] = field(default_factory=list)
    """The k of pass@k; empty: 1 and the powers of two up to the number of responses."""
    max_failure_rate: float = 0.25
    """Share of responses that may be without a score before the command fails."""
