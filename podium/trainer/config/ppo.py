"""The configuration of `podium.trainer.main_ppo`."""

from dataclasses import dataclass, field
from typing import Any

from podium.trainer.config.shared import FSDPConfig, ModelConfig, OptimConfig, TrackingConfig


@dataclass
class DataConfig:
    train_files: Any = ""
    """Parquet or JSON-lines file, or a list of them. Required."""
    val_files: Any = ""
    """As train_files, for validation. Required unless validation is off."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string or a chat list."""
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
    shuffle: bool = True
    """New order each epoch, from seed."""
    seed: int = 1
    """Seeds the order of the data."""
    trust_remote_code: bool = False
    """Run tokenizer code that comes with the checkpoint."""


@dataclass
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """Name of a registered policy loss (docs/algorithms.md)."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of tokens whose gradient is cut."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of the covariance band."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of the covariance band."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of tokens that get a KL penalty."""
    ppo_kl_coef: float = 0.1
    """kl_cov: coefficient of that penalty."""
    dro_beta: float = 1.0
    """dro: weight of the square that holds the policy to the one that sampled."""


@dataclass
class ActorConfig:
    strategy: str = "fsdp"
    """Training engine: fsdp."""
    ppo_mini_batch_size: int = 256
    """Prompts in one optimizer step, over all ranks (times rollout.n samples)."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward and backward on one rank. Changes memory, never the result. Required."""
    ppo_epochs: int = 1
    """Passes over each rollout batch."""
    clip_ratio: float = 0.2
    """PPO clip on both sides, where the two below are null."""
    clip_ratio_low: float | None = None
    """Lower clip."""
    clip_ratio_high: float | None = None
    """Upper clip (DAPO's clip-higher)."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the loss for negative advantages, as a ratio above 1."""
    loss_agg_mode: str = "token-mean"
    """token-mean | token-sum | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm."""
    loss_scale_factor: int | None = None
    """Tokens that seq-mean-token-sum-norm divides by; null takes data.max_response_length."""
    tau_pos: float = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    tau_neg: float = 1.05
    """sapo: the same elsewhere; larger fades faster."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss (GRPO)."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: str = "low_var_kl"
    """Estimator: kl | abs | mse | low_var_kl, and their straight-through forms with a trailing +."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward; null takes the actor's ppo_micro_batch_size_per_gpu."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass
class ValKwargs:
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    top_k: int = -1
    """Sample from so many of the likeliest tokens; -1 keeps the whole vocabulary."""
    n: int = 1
    """Responses for each validation prompt; their mean and best are reported."""


@dataclass
class WeightSyncConfig:
    transport: str = "auto"
    """How weights travel from the actor to the rollout: auto | colocated."""
    verify: str = "full"
    """Compare checksums of what was sent with what generation uses: off | sample | full."""


@dataclass
class RolloutConfig:
    name: str = "vllm"
    """vllm | hf (plain transformers)."""
    n: int = 1
    """Responses for each prompt."""
    temperature: float = 1.0
    """Sampling temperature; training log-probs are taken at the same one."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    dtype: str = "float32"
    """Precision of generation: float32 | bfloat16."""
    tensor_model_parallel_size: int = 1
    """Ranks that share one copy of the rollout model."""
    gpu_memory_utilization: float = 0.5
    """vLLM's share of a GPU's memory."""
    max_num_seqs: int = 256
    """Most sequences decoded together on one rank."""
    enforce_eager: bool = True
    """No CUDA graphs."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward for old log-probs; null takes the actor's ppo_micro_batch_size_per_gpu."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class CriticModelConfig:
    path: str | None = None
    """Where the critic starts; null takes the actor's model. Its value head starts at zero."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in backward."""


@dataclass
class CriticConfig:
    strategy: str = "fsdp"
    """Training engine: fsdp."""
    ppo_mini_batch_size: int | None = None
    """Prompts in one optimizer step; null takes the actor's."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward and backward on one rank; null takes the actor's."""
    ppo_epochs: int | None = None
    """Passes over each rollout batch; null takes the actor's."""
    cliprange_value: float | None = 0.5
    """PPO's clip of the value's move from the old value; null is no clip."""
    loss_agg_mode: str = "token-mean"
    """As for the actor."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass
class KLControlConfig:
    type: str = "fixed"
    """fixed | adaptive (Ziegler et al. 2019)."""
    kl_coef: float = 0.0
    """KL penalty in the reward, per token. Above 0 it is on."""
    horizon: int = 10000
    """adaptive: samples over which the coefficient may double."""
    target_kl: float = 0.1
    """adaptive: KL per token to steer to."""


@dataclass
class RolloutCorrectionConfig:
    """Train/rollout mismatch (docs/algorithms.md). Its size is reported in any case."""

    rollout_is: str | None = None
    """Importance weights on the policy loss: token | sequence; null is none."""
    rollout_is_threshold: str = "2.0"
    """Weights above it are truncated; lower_upper (0.5_5.0) gives weight 0 outside the band."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: str | None = None
    """What is taken out of the policy loss: token_k1 ... seq_max_k3, several by commas; null is nothing."""
    rollout_rs_threshold: str | None = None
    """Bound of each rollout_rs, or one for all. k1: band of probability ratios (0.99_1.01); k2 and k3: nats."""
    bypass_mode: bool = False
    """Take the rollout's log-probs as old log-probs: saves a forward, and the loss's own ratio corrects."""


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling."""

    enable: bool = False
    """Train only on prompts whose responses differ in the metric; others are generated in their place."""
    metric: str = "score"
    """score (of the reward function) | seq_reward (with the overlong penalty) | a key that the function returns."""
    max_num_gen_batches: int = 10
    """Most batches of prompts generated for one training batch before the run stops; 0 is no limit."""


@dataclass
class PFPPOConfig:
    """PF-PPO's resampling of the batch by reward."""

    reweight_method: str = "pow"
    """How often a response is drawn again: pow | max_min | max_random."""
    weight_pow: float = 2.0
    """pow: exponent of the absolute reward."""


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "gae"
    """Name of a registered advantage estimator (docs/algorithms.md)."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantage by the group's standard deviation; false is Dr.GRPO."""
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """gdpo: keys of the reward function's result that are normalised apart, then added."""
    gdpo_reward_weights: list[float] = field(default_factory=list)
    """gdpo: weight of each key; empty is 1 for all."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    use_pf_ppo: bool = False
    """Train on responses drawn again, with replacement, by how much their reward says."""
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)
    use_kl_in_reward: bool | None = None
    """KL to the reference in the reward; null: on when kl_ctrl.kl_coef is above 0."""
    kl_penalty: str = "kl"
    """Estimator of that KL: kl | abs | mse | low_var_kl."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)


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
class RewardModelConfig:
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass
class RewardFunctionConfig:
    path: str | None = None
    """Python file with the reward function; null scores by data_source."""
    name: str = "compute_score"
    """Function in that file: (data_source, solution_str, ground_truth, extra_info) -> number or dict with score."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for it."""


@dataclass
class TrainerConfig(TrackingConfig):
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Iterations; null follows from total_epochs."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Ranks on each machine: GPUs, or processes on a CPU machine."""
    device: str = "auto"
    """auto | cpu | cuda."""
    backend: str = "ray"
    """Who runs the workers: ray | local (this process for one rank, spawned processes for several)."""
    critic_warmup: int = 0
    """Iterations at the start that train only the critic."""
    val_before_train: bool = True
    """Validate the untouched policy first."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: int = -1
    """Iterations between validations; -1 validates at the end only."""
    save_freq: int = -1
    """Iterations between checkpoints; -1 saves at the end only."""
    log_val_generations: int = 8
    """Rows of the validation sample table."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules imported before the run: they register advantage estimators and policy losses."""
    seed: int = 0
    """Seeds models, sampling and everything but the data order."""
    rpc_timeout_s: float = 1800.0
    """Longest that one call to the workers may take before the run stops and names who is late."""


@dataclass
class PPOConfig:
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    custom_reward_function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
