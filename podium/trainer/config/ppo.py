"""The configuration of `podium.trainer.main_ppo`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from podium.trainer.config.algorithm import AlgorithmConfig
from podium.trainer.config.reward import RewardFunctionConfig, RewardModelConfig
from podium.trainer.config.rollout import RolloutConfig
from podium.trainer.config.shared import (
    ChatConfig,
    CheckpointConfig,
    ModelConfig,
    SupervisedDeadlinesConfig,
    TrackingConfig,
    WorkersConfig,
)
from podium.trainer.config.training import ActorConfig, CriticConfig, RefConfig


@dataclass
class CustomClassConfig:
    path: str | None = None
    """Python file with the class; null takes Podium's own."""
    name: str | None = None
    """Name of the class in it. Required with path."""


@dataclass
class DataConfig(ChatConfig):
    train_files: Any = ""
    """Parquet or JSON-lines file, pattern, folder (of files, or from save_to_disk), or a list of these. Required."""
    train_weights: list[float] | None = None
    """Share of each entry of train_files in a batch; null takes every row once an epoch."""
    val_files: Any = ""
    """As train_files, for validation. Required unless validation is off."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string or a chat list."""
    column_names: dict[str, str] = field(default_factory=dict)
    """What the files call data_source, reward_model, extra_info, or a ground_truth of its own."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    """A PromptDataset of one's own (docs/data.md)."""
    sampler: CustomClassConfig = field(default_factory=CustomClassConfig)
    """A Sampler of one's own, such as a curriculum (docs/data.md)."""
    max_prompt_length: int = 512
    """Tokens; longer prompts are handled by truncation or filter_overlong_prompts."""
    max_response_length: int = 512
    """Tokens, end-of-sequence included."""
    train_batch_size: int = 256
    """Prompts in an iteration, over all ranks."""
    val_batch_size: int | None = None
    """Prompts validated together; null takes the whole validation set."""
    truncation: str = "error"
    """What to do with an overlong prompt: error | left | right | middle."""
    filter_overlong_prompts: bool = False
    """Drop overlong prompts instead (counts are printed)."""
    filter_overlong_prompts_workers: int = 1
    """Processes that render and tokenize the prompts, filtered or not."""
    shuffle: bool = True
    """New order each epoch, from seed."""
    seed: int = 1
    """Seeds the order of the data."""
    trust_remote_code: bool = False
    """Run tokenizer code that comes with the checkpoint."""


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class PPODeadlinesConfig(SupervisedDeadlinesConfig):
    generate_s: float | None = None
    """Seconds for the responses of a batch."""
    score_s: float | None = None
    """Seconds for a reward model's scores of a batch."""


@dataclass
class TrainerConfig(WorkersConfig, CheckpointConfig, TrackingConfig):
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Iterations; null follows from total_epochs."""
    invariants: str = "warn"
    """What a step does that breaks a rule of invariants/violated (ratio 1 on the first mini-batch, small gap between
    rollout and trainer, whole groups, nothing after the end of a response): warn | stop."""
    max_restarts: int = 0
    """Times that the workers are started anew, from the last checkpoint, after one of them died or did not answer (a
    rollout in processes of its own: rollout.max_restarts first)."""
    critic_warmup: int = 0
    """Iterations at the start that train only the critic."""
    val_before_train: bool = True
    """Validate the untouched policy first."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: int = -1
    """Iterations between validations; -1 validates at the end only."""
    record_freq: int = -1
    """Iterations between those whose updates' batches are kept in bundles/: podium replay makes such an update again
    without generating anything; -1 keeps only those of updates that were not finite (bad_steps/)."""
    log_val_generations: int = 8
    """Rows of the validation sample table."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules imported before the run: they register advantage estimators and policy losses."""
    seed: int = 0
    """Seeds models, sampling and everything but the data order."""
    deadlines: PPODeadlinesConfig = field(default_factory=PPODeadlinesConfig)


@dataclass
class PPOConfig:
    FOLLOWS: ClassVar[dict[str, str]] = {
        "actor_rollout_ref.ref.megatron": "actor_rollout_ref.actor.megatron",
        "critic.megatron": "actor_rollout_ref.actor.megatron",
        "reward_model.megatron": "actor_rollout_ref.actor.megatron",
    }
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    custom_reward_function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
