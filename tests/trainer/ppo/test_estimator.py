import pytest
import torch

from podium.trainer.ppo.advantages import AdvantageEstimator, register_adv_est
from podium.trainer.ppo.estimator import Estimator
from podium.utils.errors import UserError


@pytest.mark.parametrize("name", AdvantageEstimator)
def test_every_shipped_estimator_gets_what_it_needs(name):
    assert "response_mask" in Estimator.named(name).reads


def test_one_of_a_users_own_gets_the_arguments_that_it_names_and_no_other():
    @register_adv_est("names_three")
    def estimator(token_level_rewards, *, gamma, weight=2.0, **kwargs):
        assert not kwargs
        return token_level_rewards * gamma * weight, token_level_rewards

    rewards = torch.ones(2, 3)
    named = Estimator.named("names_three")
    advantages, _ = named({"token_level_rewards": rewards, "gamma": 0.5, "lam": 1.0})
    assert torch.equal(advantages, rewards) and named.reads == {"token_level_rewards", "gamma", "weight"}


def test_an_argument_that_nobody_has_is_named():
    @register_adv_est("asks_too_much")
    def estimator(token_level_rewards, moon_phase, tide):
        raise AssertionError

    with pytest.raises(UserError, match=r"algorithm.adv_estimator=asks_too_much needs .* moon_phase, tide, which"):
        Estimator.named("asks_too_much")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match="did you mean 'rloo'"):
        Estimator.named("rlo")
