"""The roles with a training engine: actor, reference, critic."""

from dataclasses import dataclass, field

from podium.trainer.config.shared import FSDPConfig, LoRAConfig, MegatronConfig, OptimConfig


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
    """Training engine: fsdp | megatron."""
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
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward; null takes the actor's ppo_micro_batch_size_per_gpu."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class CriticModelConfig(LoRAConfig):
    path: str | None = None
    """Where the critic starts; null takes the actor's model. Its value head starts at zero."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in backward."""


@dataclass
class CriticConfig:
    strategy: str = "fsdp"
    """Training engine: fsdp | megatron."""
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
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
