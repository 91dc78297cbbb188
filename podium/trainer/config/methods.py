"""Which keys each method reads, and which combinations of methods make sense. Imports without torch."""

from podium.trainer.config.algorithm import AlgorithmConfig
from podium.trainer.config.ppo import PPOConfig
from podium.trainer.config.training import ActorConfig
from podium.trainer.ppo.registry import AdvantageEstimator, unknown_name
from podium.utils.errors import UserError

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"

ESTIMATOR_KEYS = {
    "gamma": ("gae", "reinforce_plus_plus"),
    "lam": ("gae",),
    "norm_adv_by_std_in_grpo": ("grpo", "grpo_passk", "gdpo"),
    "gdpo_reward_keys": ("gdpo",),
    "gdpo_reward_weights": ("gdpo",),
}
"""Keys of `algorithm` that only some of the shipped estimators read."""

_CLIP = ("vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl")
LOSS_KEYS = {
    "clip_ratio": _CLIP,
    "clip_ratio_low": _CLIP,
    "clip_ratio_high": _CLIP,
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "policy_loss.clip_cov_ratio": ("clip_cov",),
    "policy_loss.clip_cov_lb": ("clip_cov",),
    "policy_loss.clip_cov_ub": ("clip_cov",),
    "policy_loss.kl_cov_ratio": ("kl_cov",),
    "policy_loss.ppo_kl_coef": ("kl_cov",),
    "policy_loss.dro_beta": ("dro",),
}
"""Keys of the actor that only some of the shipped policy losses read."""

LOSSES = (*_CLIP, "kl_cov", "sapo", "gpg", "dro")
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
PF_PPO_METHODS = ("pow", "max_min", "max_random")


def check_methods(config: PPOConfig) -> None:
    """Refuses names that no method has, and methods that need something which is not there.

    Estimators and losses are looked up later: a plug-in may add to them.

    Raises:
        UserError: names the key and what to do.
    """
    algorithm, actor, critic = config.algorithm, config.actor_rollout_ref.actor, config.critic
    _one_of(f"{ACTOR}.loss_agg_mode", actor.loss_agg_mode, AGG_MODES)
    _one_of("critic.loss_agg_mode", critic.loss_agg_mode, AGG_MODES)
    _kl(f"{ACTOR}.kl_loss_type", actor.kl_loss_type, (*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)))
    _kl("algorithm.kl_penalty", algorithm.kl_penalty, KL_ESTIMATORS)
    _one_of("algorithm.pf_ppo.reweight_method", algorithm.pf_ppo.reweight_method, PF_PPO_METHODS)
    if actor.loss_scale_factor is not None and actor.loss_scale_factor < 1:
        raise UserError(f"{ACTOR}.loss_scale_factor={actor.loss_scale_factor}: expected at least 1 token")
    if not actor.policy_loss.dro_beta > 0:
        raise UserError(f"{ACTOR}.policy_loss.dro_beta={actor.policy_loss.dro_beta}: expected a positive number")
    _correction(algorithm)
    _gdpo(config)
    if algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        raise UserError(
            "algorithm.filter_groups.enable=true keeps prompts whose responses differ in reward, and "
            "actor_rollout_ref.rollout.n=1 leaves nothing to differ: set it to 2 or more"
        )
    buffer, longest = config.reward_model.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 1 <= buffer.len <= longest:
        raise UserError(
            f"reward_model.overlong_buffer.len={buffer.len}: expected 1 to data.max_response_length={longest} tokens"
        )


def _one_of(key: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise unknown_name(key, name, known)


def _kl(key: str, name: str, known: tuple[str, ...]) -> None:
    if name.removesuffix("+") == "full":
        raise UserError(
            f"{key}={name} needs whole next-token distributions, and the trainer keeps the log-probs of the sampled "
            "tokens only: use low_var_kl"
        )
    _one_of(key, name, known)


def _correction(algorithm: AlgorithmConfig) -> None:
    correction = algorithm.rollout_correction
    if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
        raise UserError(f"{CORRECTION}.rollout_rs={correction.rollout_rs} needs {CORRECTION}.rollout_rs_threshold")
    for name in ("rollout_is", "rollout_rs"):
        if correction.bypass_mode and getattr(correction, name) is not None:
            raise UserError(
                f"{CORRECTION}.{name} has no effect with bypass_mode=true, where old and rollout log-probs are the "
                "same: remove one of the two"
            )


def _gdpo(config: PPOConfig) -> None:
    algorithm = config.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    if not algorithm.gdpo_reward_keys:
        raise UserError(
            "algorithm.gdpo_reward_keys is not set: the keys of the reward function's result that gdpo normalises "
            "apart, such as [accuracy,format]"
        )
    weights, keys = algorithm.gdpo_reward_weights, algorithm.gdpo_reward_keys
    if weights and len(weights) != len(keys):
        raise UserError(f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} gdpo_reward_keys")
    why = "has no effect with algorithm.adv_estimator=gdpo, which reads the reward function's components: remove it"
    if config.reward_model.overlong_buffer.enable:
        raise UserError(f"reward_model.overlong_buffer {why}")
    if algorithm.use_kl_in_reward or (algorithm.use_kl_in_reward is None and algorithm.kl_ctrl.kl_coef > 0):
        raise UserError(f"the KL in the reward {why.removesuffix('remove it')}use {ACTOR}.use_kl_loss=true")


def method_rules(config: PPOConfig) -> list[tuple[str, str]]:
    """Keys (or parents of keys) that the chosen methods never read, and why. A plug-in's methods may read any."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    rules = [*_estimator_rules(algorithm), *_loss_rules(actor)]
    correction = algorithm.rollout_correction
    if correction.rollout_is is None:
        leaves = ("rollout_is_threshold", "rollout_is_batch_normalize")
        rules += [(f"{CORRECTION}.{leaf}", "without rollout_is") for leaf in leaves]
    if correction.rollout_rs is None:
        rules.append((f"{CORRECTION}.rollout_rs_threshold", "without rollout_rs"))
    if correction.bypass_mode:
        key = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
        rules.append((key, "with bypass_mode=true, which makes no such forward"))
    if not algorithm.filter_groups.enable:
        leaves = ("metric", "max_num_gen_batches")
        rules += [(f"algorithm.filter_groups.{leaf}", "without filter_groups.enable=true") for leaf in leaves]
    if not algorithm.use_pf_ppo:
        rules.append(("algorithm.pf_ppo", "without algorithm.use_pf_ppo=true"))
    elif algorithm.pf_ppo.reweight_method != "pow":
        rules.append(("algorithm.pf_ppo.weight_pow", f"with reweight_method={algorithm.pf_ppo.reweight_method}"))
    if not config.reward_model.overlong_buffer.enable:
        leaves = ("len", "penalty_factor")
        why = "without overlong_buffer.enable=true"
        rules += [(f"reward_model.overlong_buffer.{leaf}", why) for leaf in leaves]
    return rules


def _estimator_rules(algorithm: AlgorithmConfig) -> list[tuple[str, str]]:
    name = algorithm.adv_estimator
    if name not in set(AdvantageEstimator):
        return []
    why = f"with algorithm.adv_estimator={name}"
    rules = [(f"algorithm.{key}", why) for key, readers in ESTIMATOR_KEYS.items() if name not in readers]
    if name != "gae":
        rules += [(key, f"{why}, which has no critic") for key in ("critic", "trainer.critic_warmup")]
    return rules


def _loss_rules(actor: ActorConfig) -> list[tuple[str, str]]:
    rules = []
    mode = actor.policy_loss.loss_mode
    if mode in LOSSES:
        why = f"with policy_loss.loss_mode={mode}"
        rules += [(f"{ACTOR}.{key}", why) for key, readers in LOSS_KEYS.items() if mode not in readers]
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        rules.append((f"{ACTOR}.loss_scale_factor", f"with loss_agg_mode={actor.loss_agg_mode}"))
    if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        rules.append((f"{ACTOR}.clip_ratio", "beside clip_ratio_low and clip_ratio_high"))
    return rules
