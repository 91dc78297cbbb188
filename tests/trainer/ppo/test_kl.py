"""KL estimators: values, and gradients in expectation against the exact KL of a small categorical."""

import math
from types import SimpleNamespace

import pytest
import torch

from podium.trainer.ppo.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    compute_kl_loss,
    get_kl_controller,
    kl_penalty,
)
from podium.trainer.ppo.losses import LOSS_AGG_MODES, Denominator, agg_loss
from podium.utils.errors import UserError
from tests.trainer.ppo import ragged

VALUES = {
    "kl": lambda p, q: p - q,
    "abs": lambda p, q: abs(p - q),
    "mse": lambda p, q: (p - q) ** 2 / 2,
    "low_var_kl": lambda p, q: math.exp(q - p) - (q - p) - 1,
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def pair(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (ragged.ROWS, ragged.WIDTH)
    policy = -torch.randn(shape, generator=random, dtype=torch.float64).abs()
    return policy, policy + 0.3 * torch.randn(shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("kind", VALUES)
def test_values_with_and_without_plus_and_by_alias(kind):
    policy, reference = pair()
    expected = torch.tensor(
        [VALUES[kind](p, q) for p, q in zip(policy.flatten().tolist(), reference.flatten().tolist(), strict=True)],
        dtype=torch.float64,
    ).view_as(policy)
    for name in (kind, kind + "+", ALIASES.get(kind, kind), ALIASES.get(kind, kind) + "+"):
        torch.testing.assert_close(kl_penalty(policy, reference, name), expected, rtol=1e-9, atol=1e-12)


def expectation(kind: str, logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Exact expectation over the policy's own tokens of the estimator's value and of its gradient in the logits."""
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
    probs = log_p.detach().exp()
    estimate = kl_penalty(log_p, log_q, kind)
    (gradient,) = torch.autograd.grad((probs * estimate).sum(), logits)
    return (probs * estimate.detach()).sum().item(), gradient


def categorical() -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=random, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, generator=random, dtype=torch.float64)
    exact = kl_penalty(logits, reference, "full")
    (gradient,) = torch.autograd.grad(exact, logits)
    return logits, reference, exact.item(), gradient


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_are_unbiased_values(kind):
    logits, reference, exact, _ = categorical()
    assert expectation(kind, logits, reference)[0] == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("kind", ["k2", "k2+", "k1+", "k3+", "abs+"])
def test_plus_forms_have_the_gradient_of_the_kl(kind):
    logits, reference, _, exact = categorical()
    torch.testing.assert_close(expectation(kind, logits, reference)[1], exact, rtol=1e-9, atol=1e-12)


def test_plain_k1_and_k3_do_not():
    logits, reference, _, exact = categorical()
    torch.testing.assert_close(expectation("k1", logits, reference)[1], torch.zeros(5, dtype=torch.float64))
    reverse = kl_penalty(reference, logits, "full")
    (reverse_gradient,) = torch.autograd.grad(reverse, logits)
    got = expectation("k3", logits, reference)[1]
    torch.testing.assert_close(got, reverse_gradient, rtol=1e-9, atol=1e-12)
    assert (got - exact).abs().max() > 1e-3


def test_monte_carlo_agrees_with_the_exact_kl():
    logits, reference, exact_value, exact_gradient = categorical()
    random = torch.Generator().manual_seed(2)
    tokens = torch.multinomial(torch.softmax(logits.detach(), -1), 200_000, replacement=True, generator=random)
    estimate = kl_penalty(torch.log_softmax(logits, -1)[tokens], torch.log_softmax(reference, -1)[tokens], "k3+")
    (gradient,) = torch.autograd.grad(estimate.mean(), logits)
    assert estimate.mean().item() == pytest.approx(exact_value, rel=0.02)
    torch.testing.assert_close(gradient, exact_gradient, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_gradient_against_finite_differences(kind):
    policy, reference = pair()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, reference, kind), policy.requires_grad_())


def test_full_takes_log_probs_or_logits():
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    reference = torch.randn(2, 3, 7, dtype=torch.float64)
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(kl_penalty(logits, reference, "full"), expected)
    torch.testing.assert_close(kl_penalty(log_p, log_q, "full+"), expected)


def test_k3_is_bounded_where_the_policies_are_far_apart():
    far = kl_penalty(torch.tensor([-400.0, 0.0]), torch.tensor([0.0, -400.0]), "k3")
    assert far.tolist() == [10.0, 10.0]


def test_unknown_kind_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'low_var_kl'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var")


@pytest.mark.parametrize("kind", VALUES)
def test_kl_in_the_reward(kind):
    policy, reference = pair()
    scores, mask = torch.randn_like(policy), ragged.response_mask()
    dirty = [ragged.poisoned(x, mask, seed) for seed, x in enumerate((scores, policy, reference))]
    rewards, mean_kl = apply_kl_penalty(*dirty, mask, 0.5, kind)
    rows = []
    for i, valid in enumerate(mask.tolist()):
        kls = []
        for t, ok in enumerate(valid):
            kl = VALUES[kind](policy[i, t].item(), reference[i, t].item())
            assert rewards[i, t].item() == pytest.approx(scores[i, t].item() - 0.5 * kl if ok else 0.0)
            kls += [kl] if ok else []
        rows += [sum(kls) / len(kls)] if kls else []
    assert mean_kl.item() == pytest.approx(sum(rows) / len(rows))


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k3+"])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_kl_in_the_loss_is_poison_proof_and_adds_up(kind, mode):
    policy, reference = pair()
    mask = ragged.response_mask()
    clean = policy.clone().requires_grad_()
    expected = agg_loss(kl_penalty(clean, reference, kind), mask, mode)
    expected.backward()
    dirty = ragged.poisoned(policy, mask).requires_grad_()
    dirty_reference = ragged.poisoned(reference, mask, 1)
    loss, metrics = compute_kl_loss(dirty, dirty_reference, mask, kind, mode)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(dirty.grad, clean.grad)
    denominator = Denominator.from_mask(mask)
    parts = [
        compute_kl_loss(dirty[r], dirty_reference[r], mask[r], kind, mode, denominator)
        for r in (slice(0, 4), slice(4, 10))
    ]
    torch.testing.assert_close(sum(part for part, _ in parts), loss)
    for key, value in metrics.items():
        torch.testing.assert_close(sum(part[key] for _, part in parts), value)


def test_adaptive_controller_moves_toward_its_target_and_resumes():
    controller = get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=2.0, horizon=1000))
    controller.update(current_kl=2.2, n_steps=100)
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    controller.update(current_kl=1000.0, n_steps=100)  # limited to +20%
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(current_kl=math.nan, n_steps=100)
    again = AdaptiveKLController(0.5, 2.0, 1000)
    again.load_state_dict(controller.state_dict())
    assert again.value == controller.value == pytest.approx(0.1 * 1.01 * 1.02)


def test_fixed_controller_stays():
    controller = get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.3))
    controller.update(100.0, 100)
    assert type(controller) is FixedKLController and controller.value == 0.3


@pytest.mark.parametrize(
    ("kl_ctrl", "message"),
    [
        ({"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.0, "horizon": 10}, "target_kl"),
        ({"type": "adaptive", "kl_coef": 0.1, "target_kl": 1.0, "horizon": 0}, "horizon"),
        ({"type": "adaptiv", "kl_coef": 0.1}, "did you mean 'adaptive'"),
    ],
)
def test_a_controller_that_makes_no_sense_is_refused(kl_ctrl, message):
    with pytest.raises(UserError, match=message):
        get_kl_controller(SimpleNamespace(**kl_ctrl))
