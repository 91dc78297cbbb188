"""Weights, rejection and metrics of the rollout correction against plain loops."""

import math

import pytest
import torch

from podium.trainer.ppo.rollout_correction import RS_KINDS, compute_rollout_correction, parse_band
from podium.utils.errors import UserError
from tests.trainer.ppo import ragged

MASK = ragged.response_mask()


def log_probs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (ragged.ROWS, ragged.WIDTH)
    rollout = -torch.randn(shape, generator=random, dtype=torch.float64).abs()
    return rollout + 0.5 * torch.randn(shape, generator=random, dtype=torch.float64), rollout


def rows_of_log_ratio(old, rollout):
    return [
        [(old[i, t] - rollout[i, t]).item() for t, ok in enumerate(valid) if ok]
        for i, valid in enumerate(MASK.tolist())
    ]


def limit(weight, band):
    lower, upper = band
    if lower is None:
        return min(weight, upper)
    return weight if lower <= weight <= upper else 0.0


@pytest.mark.parametrize("threshold", [1.5, "1.5", "0.7_1.5"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights(level, threshold, normalize):
    old, rollout = log_probs()
    band = parse_band("x", threshold)
    rows = rows_of_log_ratio(old, rollout)
    if level == "token":
        expected = [[limit(math.exp(x), band) for x in row] for row in rows]
        units = [w for row in expected for w in row]
        raw = [math.exp(x) for row in rows for x in row]
    else:
        expected = [[limit(math.exp(sum(row)), band)] * len(row) for row in rows]
        units = [row[0] for row in expected if row]
        raw = [math.exp(sum(row)) for row in rows if row]
    scale = sum(units) / len(units) if normalize else 1.0
    weights, kept, metrics = compute_rollout_correction(old, rollout, MASK, level, threshold, normalize)
    assert torch.equal(kept, MASK)
    for i, valid in enumerate(MASK):
        assert weights[i][valid].tolist() == pytest.approx([w / scale for w in expected[i]])
        assert bool((weights[i][~valid] == 0).all())
    outside = sum(w > band[1] or (band[0] is not None and w < band[0]) for w in raw)
    ess = sum(units) ** 2 / (len(units) * sum(w * w for w in units))
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(sum(units) / len(units))
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(max(raw))
    assert metrics["rollout_corr/rollout_is_clipped_fraction"] == pytest.approx(outside / len(raw))
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(ess)


def statistic(kind, x):
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[kind]


@pytest.mark.parametrize("name", RS_KINDS)
def test_rejection(name):
    old, rollout = log_probs()
    level, kind = name.rsplit("_", 1)
    threshold = "0.8_1.1" if kind == "k1" else "0.1"
    low, high = (math.log(0.8), math.log(1.1)) if kind == "k1" else (-math.inf, 0.1)
    _, kept, metrics = compute_rollout_correction(old, rollout, MASK, rollout_rs=name, rollout_rs_threshold=threshold)
    lost = 0
    for i, row in enumerate(rows_of_log_ratio(old, rollout)):
        stats = [statistic(kind, x) for x in row]
        if row and level != "token":
            stats = [{"seq_sum": sum(stats), "seq_mean": sum(stats) / len(row), "seq_max": max(stats)}[level]] * len(
                row
            )
        expected = [low <= s <= high for s in stats]
        assert kept[i][MASK[i]].tolist() == expected
        assert not kept[i][~MASK[i]].any()
        lost += sum(not ok for ok in expected)
    assert 0 < lost < int(MASK.sum())
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost / int(MASK.sum()))


def test_several_kinds_must_all_agree():
    old, rollout = log_probs()
    both = compute_rollout_correction(
        old, rollout, MASK, rollout_rs="token_k2, seq_mean_k1", rollout_rs_threshold="0.1,1.2"
    )
    first = compute_rollout_correction(old, rollout, MASK, rollout_rs="token_k2", rollout_rs_threshold=0.1)
    second = compute_rollout_correction(old, rollout, MASK, rollout_rs="seq_mean_k1", rollout_rs_threshold="1.2")
    assert torch.equal(both[1], first[1] & second[1])


def test_mismatch_metrics():
    old, rollout = log_probs()
    weights, _, metrics = compute_rollout_correction(old, rollout, MASK)
    gaps = [x for row in rows_of_log_ratio(old, rollout) for x in row]
    assert weights is None
    assert metrics["rollout_corr/kl"] == pytest.approx(-sum(gaps) / len(gaps))
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(sum(math.exp(x) - x - 1 for x in gaps) / len(gaps))
    assert metrics["rollout_corr/ratio_max"] == pytest.approx(math.exp(max(abs(x) for x in gaps)))


def test_equal_policies_need_no_correction():
    old, _ = log_probs()
    weights, kept, metrics = compute_rollout_correction(
        old, old, MASK, "sequence", rollout_rs="token_k3", rollout_rs_threshold=1e-6
    )
    assert torch.equal(weights, MASK.double()) and torch.equal(kept, MASK)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0 and metrics["rollout_corr/ratio_max"] == 1.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_slots_and_extremes_stay_out(level):
    old, rollout = log_probs()
    clean = compute_rollout_correction(old, rollout, MASK, level, 2.0, True, "seq_max_k3", 0.3)
    dirty = compute_rollout_correction(
        ragged.poisoned(old, MASK), ragged.poisoned(rollout, MASK, 1), MASK, level, 2.0, True, "seq_max_k3", 0.3
    )
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1]) and clean[2] == dirty[2]
    _, _, metrics = compute_rollout_correction(old, rollout - 1e4, MASK, level)
    assert all(math.isfinite(value) for value in metrics.values())
    weights, _, metrics = compute_rollout_correction(old, rollout, torch.zeros_like(MASK), level, 2.0, True)
    assert not weights.any() and not any(value for key, value in metrics.items() if "ratio_max" not in key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "did you mean 'token'"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": "nan"}, "rollout_is_threshold"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "did you mean 'token_k"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "upper bound"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        compute_rollout_correction(*log_probs(), MASK, **options)
