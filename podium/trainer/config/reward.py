"""Where scores come from."""

from dataclasses import dataclass, field
from typing import Any

from podium.trainer.config.rollout import GenerationConfig
from podium.trainer.config.shared import FSDPConfig, MegatronConfig


@dataclass
class OverlongBufferConfig:
    """DAPO's soft penalty for length. Training only; validation reports the reward function's score."""

    enable: bool = False
    """Take a penalty from the score of responses that come near data.max_response_length."""
    len: int = 0
    """Tokens before the maximum over which the penalty grows from 0. Required when enabled."""
    penalty_factor: float = 1.0
    """Penalty at the maximum, in units of score."""


@dataclass
class RewardModelPathConfig:
    path: str | None = None
    """Hugging Face directory that AutoModelForSequenceClassification loads with one label; of a generative one, any
    causal language model. Required when enabled. With another tokenizer than the policy's it reads the text."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""


@dataclass
class JudgeConfig:
    template: str | None = None
    """File with what a generative reward model is asked: a Jinja template over prompt, response, ground_truth,
    data_source and extra_info; null takes Podium's own, which asks for a score from 0 to 10 (docs/rewards.md)."""
    verdict: str = r"(?i)score[^\w-]{0,4}(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the number. Its last match in the answer is the score; an answer without one
    leaves the response without a score."""
    score_range: list[float] = field(default_factory=lambda: [0.0, 10.0])
    """Least and largest score; a number outside leaves the response without a score."""
    max_prompt_length: int = 2048
    """Tokens of what it is asked; a response that would take more has no score."""
    max_response_length: int = 256
    """Tokens of its answer, end-of-sequence included."""


@dataclass
class JudgeRolloutConfig(GenerationConfig):
    temperature: float = 0.0
    """0 is greedy."""


@dataclass
class ScoringConfig:
    reward_manager: str = "naive"
    """naive (one call of the function a response) | dapo (naive, with the overlong_buffer) | batch (one call with all
    responses) | remote (a server at url scores)."""
    url: str | None = None
    """Where a remote scorer takes POST requests, such as http://host:8000/score. Required with manager remote."""
    rate_limit: float | None = None
    """Requests a second to a remote scorer; null is no limit."""
    num_workers: int | None = None
    """Processes that score; null takes one for each core, at most 32."""
    timeout_s: float = 30.0
    """Seconds for one response (batch: for one call). A process that is late is killed; the response has no score."""
    memory_limit_mb: int | None = 4096
    """MiB of memory that a scoring process may have of its own; null is no limit."""
    max_concurrency: int = 64
    """Responses that an async function, or a remote scorer, works on at the same time."""
    max_retries: int = 3
    """Further attempts of an async function that raised, or a remote scorer that failed, within timeout_s, at pauses
    that double from half a second."""


@dataclass
class RewardModelConfig(ScoringConfig):
    enable: bool = False
    """Score responses by a reward model. A custom_reward_function is added to it; none is needed."""
    style: str = "discriminative"
    """discriminative (a model with a score head) | generative (a language model that is asked and answers: a judge)."""
    enable_resource_pool: bool = False
    """Run it in processes of its own, on nnodes x n_gpus_per_node devices of its own; else in the trainer's."""
    nnodes: int = 1
    """Machines of its own."""
    n_gpus_per_node: int | None = None
    """Ranks on each of those machines: GPUs, or processes on a CPU machine. Required with enable_resource_pool."""
    model: RewardModelPathConfig = field(default_factory=RewardModelPathConfig)
    strategy: str = "fsdp"
    """Engine of the forward: fsdp | megatron."""
    micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward; null takes the actor's ppo_micro_batch_size_per_gpu."""
    normalize: str = "none"
    """What is done to the model's scores: none | batch (mean 0 and variance 1 over the batch)."""
    weight: float = 1.0
    """Weight of the model's score in the reward."""
    function_weight: float = 1.0
    """Weight of the custom reward function's score beside it; 0 reports that score and does not train on it."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    max_failure_rate: float = 0.25
    """Share of a batch that may be without a score (timeout, error, abstain); beyond it the run stops."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    rollout: JudgeRolloutConfig = field(default_factory=JudgeRolloutConfig)
    """The engine of a generative one."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass
class RewardFunctionConfig:
    path: str | None = None
    """Python file with the reward function; null takes a built-in one."""
    name: str = "compute_score"
    """Function in that file: (data_source, solution_str, ground_truth, extra_info) -> number or dict with score.
    Without a file, the name of a built-in reward; compute_score chooses it by data_source."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for it."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Several functions in place of one, summed: label -> {path, name, weight, reward_kwargs}; each part is logged."""
