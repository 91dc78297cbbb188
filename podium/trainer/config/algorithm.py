"""What the algorithm is: estimator, KL, filters and corrections."""

from dataclasses import dataclass, field


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
