"""Promises of every estimator, and golden values of those that look at each token."""

import copy

import numpy as np
import pytest
import torch

from podium.trainer.ppo import advantages
from podium.trainer.ppo.advantages import AdvantageEstimator, get_adv_estimator_fn, register_adv_est
from podium.utils.errors import UserError
from tests.trainer.ppo import ragged

ESTIMATORS = [str(name) for name in AdvantageEstimator]


def whitened(rows: list[list[float]], mask: torch.Tensor) -> list[list[float]]:
    """Plain loop: mean 0, variance 1 (n - 1) over valid slots."""
    kept = [x for row, valid in zip(rows, mask.tolist(), strict=True) for x, ok in zip(row, valid, strict=True) if ok]
    mean = sum(kept) / len(kept)
    variance = sum((x - mean) ** 2 for x in kept) / (len(kept) - 1)
    scale = (variance + 1e-8) ** -0.5
    return [
        [(x - mean) * scale if ok else 0.0 for x, ok in zip(row, valid, strict=True)]
        for row, valid in zip(rows, mask.tolist(), strict=True)
    ]


def assert_close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=1e-9, atol=1e-9)


def loop_gae(inputs: dict) -> tuple[list[list[float]], list[list[float]]]:
    raw, returns = [], []
    for reward, value, mask in zip(
        inputs["token_level_rewards"].tolist(),
        inputs["values"].tolist(),
        inputs["response_mask"].tolist(),
        strict=True,
    ):
        next_value = last = 0.0
        advantage = [0.0] * len(mask)
        for t in reversed(range(len(mask))):
            if mask[t]:
                last = reward[t] + inputs["gamma"] * next_value - value[t] + inputs["gamma"] * inputs["lam"] * last
                next_value = value[t]
                advantage[t] = last
        raw.append(advantage)
        returns.append([a + v if ok else 0.0 for a, v, ok in zip(advantage, value, mask, strict=True)])
    return raw, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5)])
def test_gae_equals_the_recursion(gamma, lam):
    inputs = ragged.batch() | {"gamma": gamma, "lam": lam}
    raw, returns = loop_gae(inputs)
    advantage, got_returns = ragged.estimate("gae", inputs)
    assert_close(got_returns, returns)
    assert_close(advantage, whitened(raw, inputs["response_mask"]))


def test_gae_is_exact_over_long_rows_and_many_chunks():
    torch.manual_seed(0)
    reward, value = torch.randn(3, 1500), torch.randn(3, 1500)
    mask = torch.rand(3, 1500) < 0.9
    inputs = {"token_level_rewards": reward, "values": value, "response_mask": mask, "gamma": 0.999, "lam": 0.99}
    _, returns = loop_gae(inputs)
    _, got = ragged.estimate("gae", inputs)
    torch.testing.assert_close(got, torch.tensor(returns), rtol=1e-5, atol=1e-5)


def test_reinforce_plus_plus_equals_the_recursion():
    inputs = ragged.batch()
    returns = []
    for reward, mask in zip(inputs["token_level_rewards"].tolist(), inputs["response_mask"].tolist(), strict=True):
        running, row = 0.0, [0.0] * len(mask)
        for t in reversed(range(len(mask))):
            if mask[t]:
                running = row[t] = reward[t] + inputs["gamma"] * running
        returns.append(row)
    advantage, got = ragged.estimate("reinforce_plus_plus", inputs)
    assert_close(got, returns)
    assert_close(advantage, whitened(returns, inputs["response_mask"]))


def test_remax_subtracts_the_greedy_reward_from_the_reward_to_go():
    inputs = ragged.batch()
    advantage, returns = ragged.estimate("remax", inputs)
    for i, (reward, mask) in enumerate(
        zip(inputs["token_level_rewards"].tolist(), inputs["response_mask"].tolist(), strict=True)
    ):
        for t, ok in enumerate(mask):
            togo = sum(reward[t:]) if ok else 0.0
            assert returns[i, t].item() == pytest.approx(togo)
            assert advantage[i, t].item() == pytest.approx(togo - inputs["reward_baselines"][i].item() if ok else 0.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_slots_may_hold_anything(name):
    inputs = ragged.batch()
    dirty = dict(inputs)
    for key in ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared"):
        dirty[key] = ragged.poisoned(inputs[key], inputs["response_mask"])
    for clean, got in zip(ragged.estimate(name, inputs), ragged.estimate(name, dirty), strict=True):
        assert torch.equal(clean, got)
        assert bool((got[~inputs["response_mask"]] == 0).all())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_all_masked_gives_zero(name):
    inputs = ragged.batch()
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    for got in ragged.estimate(name, inputs):
        assert bool((got == 0).all())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_row_order_does_not_matter(name):
    inputs = ragged.batch()
    order = np.random.default_rng(3).permutation(ragged.ROWS).tolist()
    shuffled = ragged.take_rows(inputs, order)
    for expected, got in zip(ragged.estimate(name, inputs), ragged.estimate(name, shuffled), strict=True):
        torch.testing.assert_close(got, expected[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_empty_responses_leave_the_others_alone(name):
    inputs = ragged.batch()
    filled = [row for row in range(ragged.ROWS) if inputs["response_mask"][row].any()]
    assert len(filled) < ragged.ROWS
    without = ragged.estimate(name, ragged.take_rows(inputs, filled))
    for expected, got in zip(without, ragged.estimate(name, inputs), strict=True):
        torch.testing.assert_close(got[filled], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_float32_in_float32_out_inputs_untouched_and_any_mask_type(name):
    inputs = ragged.batch(dtype=torch.float32)
    before = copy.deepcopy(inputs)
    advantage, returns = ragged.estimate(name, inputs)
    assert advantage.dtype == returns.dtype == torch.float32
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[key])
    for dtype in (torch.int64, torch.float32):
        again, _ = ragged.estimate(name, inputs | {"response_mask": inputs["response_mask"].to(dtype)})
        assert torch.equal(again, advantage)


def test_unknown_estimator_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        get_adv_estimator_fn("grop")


def test_an_estimator_from_outside_is_found_by_name():
    @register_adv_est("test_only_zero")
    def zero(token_level_rewards, response_mask):
        return torch.zeros_like(token_level_rewards), torch.zeros_like(token_level_rewards)

    assert get_adv_estimator_fn("test_only_zero") is zero
    with pytest.raises(UserError, match="already registered"):
        register_adv_est("gae")(zero)


def test_every_name_has_its_function():
    assert set(ESTIMATORS) <= set(advantages.ADV_ESTIMATOR_REGISTRY.names())
