"""What the configuration says about the methods agrees with the methods, and the command line is held to it."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from podium.trainer.config import PPOConfig, check_config, load_config
from podium.trainer.config.methods import (
    AGG_MODES,
    ESTIMATOR_KEYS,
    KL_ESTIMATORS,
    LOSS_KEYS,
    LOSSES,
    PF_PPO_METHODS,
)
from podium.trainer.ppo import kl, sampling
from podium.trainer.ppo.advantages import AdvantageEstimator, get_adv_estimator_fn
from podium.trainer.ppo.losses import LOSS_AGG_MODES, get_policy_loss_fn
from podium.utils.errors import UserError

ACTOR = "actor_rollout_ref.actor."
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
CORRECTION = "algorithm.rollout_correction."


def check(*argv: str) -> PPOConfig:
    config, explicit = load_config(PPOConfig, list(argv))
    check_config(config, explicit)
    return config


def test_the_names_are_those_that_the_functions_know():
    assert AGG_MODES == LOSS_AGG_MODES
    assert set(KL_ESTIMATORS) == set(kl.KL_KINDS) - {"full"}
    assert PF_PPO_METHODS == sampling.PF_PPO_METHODS
    assert all(get_policy_loss_fn(name) for name in LOSSES)


class Recorder(SimpleNamespace):
    """Notes which fields are read."""

    def __getattribute__(self, name):
        if not name.startswith("_"):
            super().__getattribute__("_read").add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_reads_the_keys_that_the_table_gives_it(loss):
    actor = PPOConfig().actor_rollout_ref.actor
    # A name that is given in both places would hide which one is the key.
    own = {key for key in LOSS_KEYS if not key.startswith("policy_loss.")}
    nested = {key.removeprefix("policy_loss.") for key in LOSS_KEYS} - own
    read: set[str] = set()
    policy_loss = Recorder(_read=read, **{name: getattr(actor.policy_loss, name) for name in nested})
    config = Recorder(_read=read, policy_loss=policy_loss, **{name: getattr(actor, name) for name in own})
    tokens = torch.randn(2, 3)
    get_policy_loss_fn(loss)(tokens, tokens, tokens, torch.ones(2, 3), config=config)
    expected = {key.removeprefix("policy_loss.") for key, readers in LOSS_KEYS.items() if loss in readers}
    assert read & (own | nested) == expected


@pytest.mark.parametrize("name", AdvantageEstimator)
def test_each_estimator_names_the_keys_that_the_table_gives_it(name):
    named = set(inspect.signature(get_adv_estimator_fn(name)).parameters)
    plain = {key for key in ESTIMATOR_KEYS if not key.startswith("gdpo")}
    assert named & plain == {key for key in plain if name in ESTIMATOR_KEYS[key]}


WITHOUT_EFFECT = {
    "gamma": [*GRPO, "algorithm.gamma=0.9"],
    "lambda": [*GRPO, "algorithm.lam=0.9"],
    "standard deviation": ["algorithm.norm_adv_by_std_in_grpo=false"],
    "GDPO's keys": [*GRPO, "algorithm.gdpo_reward_keys=[a]"],
    "dual clip": [*GRPO, f"{ACTOR}policy_loss.loss_mode=gspo", f"{ACTOR}clip_ratio_c=4"],
    "clip": [*GRPO, f"{ACTOR}policy_loss.loss_mode=sapo", f"{ACTOR}clip_ratio=0.1"],
    "clip beside both sides": [f"{ACTOR}{key}=0.1" for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")],
    "SAPO's temperature": [f"{ACTOR}tau_pos=2"],
    "another loss's option": [f"{ACTOR}policy_loss.dro_beta=2"],
    "horizon": [f"{ACTOR}loss_scale_factor=100"],
    "threshold without weights": [f"{CORRECTION}rollout_is_threshold=3"],
    "normalised weights without weights": [f"{CORRECTION}rollout_is_batch_normalize=true"],
    "threshold without rejection": [f"{CORRECTION}rollout_rs_threshold=3"],
    "weights in bypass mode": [f"{CORRECTION}bypass_mode=true", f"{CORRECTION}rollout_is=token"],
    "forward in bypass mode": [
        f"{CORRECTION}bypass_mode=true",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    ],
    "filter's metric": ["algorithm.filter_groups.metric=acc"],
    "PF-PPO's method": ["algorithm.pf_ppo.reweight_method=max_min"],
    "PF-PPO's exponent": [
        "algorithm.use_pf_ppo=true",
        "algorithm.pf_ppo.reweight_method=max_min",
        "algorithm.pf_ppo.weight_pow=3",
    ],
    "overlong buffer": ["reward_model.overlong_buffer.len=4"],
}


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_a_key_without_effect_is_refused(case):
    with pytest.raises(UserError, match=r"^\S+ has no effect .*remove"):
        check(*WITHOUT_EFFECT[case])


GDPO = ["algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=4"]
IMPOSSIBLE = {
    "exact KL in the loss": (
        [f"{ACTOR}use_kl_loss=true", f"{ACTOR}kl_loss_type=full"],
        f"{ACTOR}kl_loss_type=full needs whole",
    ),
    "exact KL in the reward": (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"],
        "algorithm.kl_penalty=full needs whole",
    ),
    "straight-through KL in the reward": (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3+"],
        "algorithm.kl_penalty 'k3\\+'; did you mean 'k3'",
    ),
    "rejection without bound": ([f"{CORRECTION}rollout_rs=token_k1"], "needs algorithm.rollout_correction.rollout_rs_"),
    "dynamic sampling of single responses": (["algorithm.filter_groups.enable=true"], "rollout.n=1"),
    "overlong buffer without length": (["reward_model.overlong_buffer.enable=true"], "overlong_buffer.len=0"),
    "overlong buffer beyond the response": (
        ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=513"],
        "max_response_length=512",
    ),
    "GDPO without keys": (GDPO, "gdpo_reward_keys is not set"),
    "GDPO with odd weights": (
        [*GDPO, "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"],
        "1 numbers for 2",
    ),
    "GDPO with a KL in the reward": (
        [*GDPO, "algorithm.gdpo_reward_keys=[a]", "algorithm.kl_ctrl.kl_coef=0.1"],
        "use_kl_loss",
    ),
    "PF-PPO by another name": (["algorithm.pf_ppo.reweight_method=maxmin"], "did you mean 'max_min'"),
    "no weight": ([f"{ACTOR}policy_loss.loss_mode=dro", f"{ACTOR}policy_loss.dro_beta=0"], "dro_beta=0"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_work_is_refused(case):
    argv, message = IMPOSSIBLE[case]
    with pytest.raises(UserError, match=message):
        check(*argv)


def test_a_plug_ins_methods_may_read_any_key():
    mine = ["algorithm.adv_estimator=mine", f"{ACTOR}policy_loss.loss_mode=my"]
    check(*mine, "algorithm.gamma=0.9", "critic.optim.lr=1", f"{ACTOR}tau_pos=2")


@pytest.mark.parametrize("band", ["0.5_2", "0.5_5.0", "3"])
def test_a_band_is_taken_as_it_is_written(band):
    config = check(f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold={band}")
    assert config.algorithm.rollout_correction.rollout_is_threshold == band


def test_a_number_may_have_underscores():
    assert check("data.train_batch_size=1_024").data.train_batch_size == 1024
