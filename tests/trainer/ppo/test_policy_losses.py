"""Every policy loss against a plain loop: value, gradient by finite differences, poison, micro-batches.

The loops take, beside the log-probs, those at which the stop-gradients are taken: a finite difference then moves only
what the loss differentiates.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from podium.trainer.ppo.losses import (
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    Denominator,
    get_policy_loss_fn,
    register_policy_loss,
)
from podium.utils.errors import UserError
from tests.trainer.ppo import ragged

LOW, HIGH, CAP = 0.2, 0.28, 2.0
CONFIG = SimpleNamespace(
    clip_ratio=0.2,
    clip_ratio_low=LOW,
    clip_ratio_high=HIGH,
    clip_ratio_c=CAP,
    policy_loss=SimpleNamespace(
        dro_beta=0.3, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0, kl_cov_ratio=0.1, ppo_kl_coef=0.5
    ),
)
LOSSES = [name for name in POLICY_LOSS_REGISTRY.names() if not name.startswith("test_")]
PER_MICRO_BATCH = {"clip_cov", "kl_cov"}  # they choose tokens by statistics of the micro-batch


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(ragged.ROWS, ragged.WIDTH, generator=random, dtype=torch.float64)

    log_prob = -normal(1.0).abs() - 0.05
    return {
        "old_log_prob": (log_prob + normal(0.6)).clamp(max=-0.01),
        "log_prob": log_prob,
        "advantages": normal(1.0),
        "response_mask": ragged.response_mask(),
    }


def clip(x, low, high):
    return min(max(x, low), high)


def vanilla(lp, old, adv, _):
    ratio = math.exp(lp - old)
    loss = max(-adv * ratio, -adv * clip(ratio, 1 - LOW, 1 + HIGH))
    return min(loss, -adv * CAP) if adv < 0 else loss


def gpg(lp, old, adv, _):
    return -adv * lp


def cispo(lp, old, adv, fixed):
    return -clip(math.exp(fixed - old), 1 - LOW, 1 + HIGH) * adv * lp


def sapo(lp, old, adv, _):
    tau = 1.0 if adv > 0 else 1.05
    return -adv * 4 / tau / (1 + math.exp(-tau * (math.exp(lp - old) - 1)))


def dro(lp, old, adv, _):
    return -(adv * lp - 0.15 * (lp - old) ** 2)


def dppo_tv(lp, old, adv, fixed):
    moved = math.exp(fixed) - math.exp(old)
    inside = moved <= HIGH if adv > 0 else moved >= -LOW
    return -adv * min(math.exp(fixed - old), CAP) * lp if inside else 0.0


def dppo_kl(lp, old, adv, fixed):
    p, q = math.exp(old), math.exp(fixed)
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    inside = kl <= HIGH or q <= p if adv > 0 else kl <= LOW or q >= p
    return -adv * min(math.exp(fixed - old), CAP) * lp if inside else 0.0


TOKEN_LOSSES = {f.__name__: f for f in (vanilla, gpg, cispo, sapo, dro, dppo_tv, dppo_kl)}


def gspo(rows):
    out = []
    for row in rows:
        s = math.exp(sum(fixed - old for _, old, _, fixed in row) / len(row))
        for lp, _, adv, fixed in row:
            ratio = s * math.exp(lp - fixed)
            out.append(max(-adv * ratio, -adv * clip(ratio, 1 - LOW, 1 + HIGH)))
    return out


def geo_mean(rows):
    out = []
    for row in rows:
        total = 0.0
        for lp, old, adv, _ in row:
            limited = clip(lp - old, -LOW, HIGH)
            total += min(lp - old, limited) if adv > 0 else max(lp - old, limited)
        adv = sum(a for _, _, a, _ in row) / len(row)
        out += [-adv * math.exp(total / len(row))] * len(row)
    return out


def covariances(tokens):
    mean_adv = sum(adv for _, _, adv, _ in tokens) / len(tokens)
    mean_lp = sum(fixed for *_, fixed in tokens) / len(tokens)
    return [(adv - mean_adv) * (fixed - mean_lp) for _, _, adv, fixed in tokens]


def clip_cov(rows):
    tokens, out = [token for row in rows for token in row], []
    for (lp, old, adv, fixed), cov in zip(tokens, covariances(tokens), strict=True):
        ratio = math.exp(lp - old)
        plain, clipped = -adv * ratio, -adv * clip(ratio, 1 - LOW, 1 + HIGH)
        held = -adv * clip(math.exp(fixed - old), 1 - LOW, 1 + HIGH) > -adv * math.exp(fixed - old)
        out.append(0.0 if 0.1 < cov < 5.0 and not held else max(plain, clipped))
    return out


def kl_cov(rows):
    tokens = [token for row in rows for token in row]
    covs = covariances(tokens)
    top = sorted(range(len(tokens)), key=lambda i: -covs[i])[: max(1, int(0.1 * len(tokens)))]
    out = [-adv * math.exp(lp - old) for lp, old, adv, _ in tokens]
    for i in top:
        out[i] += 0.5 * abs(tokens[i][0] - tokens[i][1])
    return out


def reference(name, log_prob, given, fixed):
    """Token losses of the loop, as a flat list over valid tokens."""
    columns = (log_prob, given["old_log_prob"], given["advantages"], fixed)
    rows = []
    for i, valid in enumerate(given["response_mask"].tolist()):
        rows.append([tuple(c[i, t].item() for c in columns) for t, ok in enumerate(valid) if ok])
    rows = [row for row in rows if row]
    if name in TOKEN_LOSSES:
        return [TOKEN_LOSSES[name](*token) for row in rows for token in row]
    return {"gspo": gspo, "geo_mean": geo_mean, "clip_cov": clip_cov, "kl_cov": kl_cov}[name](rows)


def run(name, given, **options):
    log_prob = given["log_prob"].clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(**(given | {"log_prob": log_prob}), config=CONFIG, **options)
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def test_there_is_a_loop_for_every_loss():
    assert set(LOSSES) == {*TOKEN_LOSSES, "gspo", "geo_mean", "clip_cov", "kl_cov"}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_equal_the_loop(name, seed):
    given = inputs(seed)
    loss, grad, _ = run(name, given, loss_agg_mode="token-mean")
    fixed, tokens = given["log_prob"], given["response_mask"].nonzero().tolist()

    def loop(log_prob):
        return sum(reference(name, log_prob, given, fixed)) / len(tokens)

    assert loss.item() == pytest.approx(loop(fixed), rel=1e-10)
    for i, t in tokens:
        step = torch.zeros_like(fixed)
        step[i, t] = 1e-6
        slope = (loop(fixed + step) - loop(fixed - step)) / 2e-6
        assert grad[i, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_slots_reach_neither_value_nor_gradient_nor_metric(name):
    given = inputs()
    mask = given["response_mask"]
    weights = torch.rand(mask.shape, dtype=torch.float64)
    dirty = {key: value if key == "response_mask" else ragged.poisoned(value, mask) for key, value in given.items()}
    clean_loss, clean_grad, clean_metrics = run(name, given, rollout_is_weights=weights)
    loss, grad, metrics = run(name, dirty, rollout_is_weights=ragged.poisoned(weights, mask))
    assert torch.equal(loss, clean_loss) and torch.equal(grad, clean_grad)
    assert bool((grad[~mask] == 0).all())
    assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in clean_metrics.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_all_masked_gives_zero_and_says_so(name):
    given = inputs()
    given["response_mask"] = torch.zeros_like(given["response_mask"])
    loss, grad, metrics = run(name, given, denominator=Denominator(100.0, 10.0))
    assert loss.item() == 0.0 and bool((grad == 0).all())
    assert metrics.pop("actor/all_masked_micro_batches").item() == 1.0
    assert all(value.item() == 0.0 for value in metrics.values())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in PER_MICRO_BATCH])
def test_any_split_of_the_mini_batch_gives_the_same_gradient_and_metrics(name, mode):
    given = inputs()
    loss, grad, metrics = run(name, given, loss_agg_mode=mode)
    denominator = Denominator.from_mask(given["response_mask"])
    for seed, sizes in enumerate([[1] * 10, [4, 6], [3, 3, 3, 1]]):
        order = torch.randperm(ragged.ROWS, generator=torch.Generator().manual_seed(seed))
        total, split_grad, seen = torch.zeros_like(loss), torch.zeros_like(grad), {}
        for rows in torch.split(order, sizes):
            part = {key: value[rows] for key, value in given.items()}
            part_loss, split_grad[rows], part_metrics = run(name, part, loss_agg_mode=mode, denominator=denominator)
            total += part_loss
            for key, value in part_metrics.items():
                before = seen.get(key, torch.zeros(()))
                seen[key] = torch.maximum(before, value) if key.endswith("_max") else before + value
        torch.testing.assert_close(total, loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(split_grad, grad, rtol=1e-10, atol=1e-14)
        for key in set(metrics) - {"actor/all_masked_micro_batches"}:
            torch.testing.assert_close(seen[key], metrics[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(name):
    given = inputs()
    given["old_log_prob"] = given["log_prob"]
    _, grad, metrics = run(name, given)
    assert metrics["actor/ratio_dev_max"].item() == 0.0
    assert metrics["actor/ppo_kl"].item() == 0.0
    if name not in PER_MICRO_BATCH:
        assert metrics.get("actor/pg_clipfrac", torch.zeros(())).item() == 0.0
    # The policy gradient itself, for all but the losses that drop or average tokens.
    if name not in PER_MICRO_BATCH | {"geo_mean"}:
        mask = given["response_mask"]
        expected = torch.where(mask, -given["advantages"], 0.0)
        per_row = mask / mask.sum(-1, keepdim=True, dtype=torch.float64).clamp(min=1) / mask.any(-1).sum()
        weights = per_row if name in ("gspo", "sapo") else mask / mask.sum(dtype=torch.float64)
        torch.testing.assert_close(grad, expected * weights, rtol=1e-10, atol=1e-12)


def test_clip_ratio_alone_sets_both_sides_and_a_missing_config_is_the_default():
    given = inputs()
    function = get_policy_loss_fn("vanilla")
    both, _ = function(**given, config=SimpleNamespace(clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=None))
    sides, _ = function(**given, config=SimpleNamespace(clip_ratio=0.9, clip_ratio_low=0.1, clip_ratio_high=0.1))
    assert both.item() == sides.item()
    assert function(**given)[0].item() == function(**given, config=SimpleNamespace(clip_ratio=0.2))[0].item()


def test_vanilla_metrics_count_what_they_say():
    given = inputs()
    _, _, metrics = run("vanilla", given)
    ratios, upper, lower, kl = [], 0, 0, 0.0
    for i, t in given["response_mask"].nonzero().tolist():
        lp, old, adv = (given[key][i, t].item() for key in ("log_prob", "old_log_prob", "advantages"))
        ratio = math.exp(lp - old)
        ratios.append(ratio)
        kl += old - lp
        upper += (ratio > 1 + HIGH) if adv > 0 else (ratio < 1 - LOW)
        lower += adv < 0 and ratio > CAP
    assert upper and lower
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(upper / len(ratios))
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(lower / len(ratios))
    assert metrics["actor/ppo_kl"].item() == pytest.approx(kl / len(ratios), rel=1e-5)
    assert metrics["actor/ratio_dev_max"].item() == pytest.approx(max(abs(r - 1) for r in ratios), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "geo_mean"])
def test_correction_weights_multiply_the_token_losses(name):
    given = inputs()
    weights = torch.full(given["log_prob"].shape, 0.5, dtype=torch.float64)
    assert run(name, given, rollout_is_weights=weights)[0].item() == pytest.approx(run(name, given)[0].item() / 2)


def test_geo_mean_takes_the_geometric_mean_of_the_weights_and_zero_rejects():
    given = {key: value[:1] for key, value in inputs().items()}
    weights = torch.ones_like(given["log_prob"])
    weights[0, 0] = 8.0
    plain, _, _ = run("geo_mean", given)
    count = int(given["response_mask"].sum())
    got, _, _ = run("geo_mean", given, rollout_is_weights=weights)
    assert got.item() == pytest.approx(plain.item() * 8 ** (1 / count))
    weights[0, 1] = 0.0
    loss, grad, _ = run("geo_mean", given, rollout_is_weights=weights)
    assert loss.item() == 0.0 and bool((grad == 0).all())


@pytest.mark.parametrize("name", LOSSES)
def test_huge_log_ratios_stay_finite(name):
    given = {key: value.float() if value.is_floating_point() else value for key, value in inputs().items()}
    given["old_log_prob"] = given["log_prob"] - 500 * given["advantages"].sign()
    loss, grad, metrics = run(name, given)
    assert torch.isfinite(loss) and bool(torch.isfinite(grad).all())
    assert all(bool(torch.isfinite(value)) for value in metrics.values())


def test_clip_cov_draws_the_configured_number():
    given = inputs()
    config = SimpleNamespace(policy_loss=SimpleNamespace(clip_cov_ratio=0.05, clip_cov_lb=-100.0, clip_cov_ub=100.0))
    _, metrics = get_policy_loss_fn("clip_cov")(**given, config=config)
    tokens = int(given["response_mask"].sum())
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(int(0.05 * tokens) / tokens)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("dro", SimpleNamespace(), "dro_beta"),
        ("vanilla", SimpleNamespace(clip_ratio_c=1.0), "clip_ratio_c"),
        ("sapo", SimpleNamespace(tau_pos=-1.0), "tau_pos"),
        ("kl_cov", SimpleNamespace(kl_cov_ratio=2.0), "kl_cov_ratio"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(name, config, message):
    with pytest.raises(UserError, match=message):
        get_policy_loss_fn(name)(**inputs(), config=config)


def test_unknown_loss_is_refused_and_one_from_outside_is_found():
    with pytest.raises(UserError, match="did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")

    @register_policy_loss("test_mine")
    def mine(*args, **kwargs):
        return torch.zeros(()), {}

    assert get_policy_loss_fn("test_mine") is mine
