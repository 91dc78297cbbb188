"""Aggregation, value loss and entropy: golden values, gradients, poison, any cut of a mini-batch."""

import pytest
import torch

from podium.trainer.ppo.losses import (
    LOSS_AGG_MODES,
    Denominator,
    agg_loss,
    compute_entropy_loss,
    compute_value_loss,
)
from podium.utils.errors import UserError
from tests.trainer.ppo import ragged


def normal(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(ragged.ROWS, ragged.WIDTH, generator=random, dtype=torch.float64)


def loop_agg(loss, mask, mode, horizon):
    rows = [
        [x for x, ok in zip(row, valid, strict=True) if ok]
        for row, valid in zip(loss.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    tokens = [x for row in rows for x in row]
    return {
        "token-mean": lambda: sum(tokens) / len(tokens),
        "token-sum": lambda: sum(tokens),
        "seq-mean-token-sum": lambda: sum(sum(row) for row in rows) / len(rows),
        "seq-mean-token-mean": lambda: sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": lambda: sum(sum(row) for row in rows) / len(rows) / horizon,
    }[mode]()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("horizon", [None, 32])
def test_agg_loss_golden(mode, horizon):
    loss, mask = normal(0), ragged.response_mask()
    expected = loop_agg(loss, mask, mode, horizon or ragged.WIDTH)
    assert agg_loss(loss, mask, mode, horizon=horizon).item() == pytest.approx(expected, rel=1e-12)
    whole = Denominator.from_mask(mask)
    assert agg_loss(loss, mask.long(), mode, whole, horizon).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("parts", [[10], [1] * 10, [3, 3, 4], [7, 2, 1]])
def test_shares_add_up_to_the_mini_batch(mode, parts):
    loss, mask = normal(1), ragged.response_mask()
    order = torch.randperm(ragged.ROWS, generator=torch.Generator().manual_seed(len(parts)))
    pieces = torch.split(order, parts)
    denominator = Denominator(0.0, 0.0)
    for rows in pieces:  # as ranks do: count locally, then add
        denominator += Denominator.from_mask(mask[rows])
    total = sum(agg_loss(loss[rows], mask[rows], mode, denominator) for rows in pieces)
    torch.testing.assert_close(total, agg_loss(loss, mask, mode), rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_agg_loss_of_nothing_is_zero_and_has_a_graph(mode):
    loss = normal(2).requires_grad_()
    total = agg_loss(loss, torch.zeros_like(loss), mode, Denominator(0.0, 0.0))
    total.backward()
    assert total.item() == 0.0 and bool((loss.grad == 0).all())
    assert agg_loss(loss, torch.zeros_like(loss), mode).item() == 0.0


def test_unknown_mode_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'token-mean'"):
        agg_loss(normal(0), ragged.response_mask(), "token_mean")


def value_inputs():
    returns, values = normal(3), normal(4)
    return {"vpreds": values + 0.3 * normal(5), "returns": returns, "values": values}


@pytest.mark.parametrize("cliprange", [0.2, None])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_value_loss_golden(cliprange, mode):
    inputs, mask = value_inputs(), ragged.response_mask()
    losses, clipped = torch.zeros_like(inputs["vpreds"]), 0
    for i, t in mask.nonzero().tolist():
        v, target, old = (inputs[key][i, t].item() for key in ("vpreds", "returns", "values"))
        plain = (v - target) ** 2
        near = plain if cliprange is None else (min(max(v, old - cliprange), old + cliprange) - target) ** 2
        losses[i, t] = 0.5 * max(plain, near)
        clipped += near > plain
    loss, metrics = compute_value_loss(**inputs, response_mask=mask, cliprange_value=cliprange, loss_agg_mode=mode)
    assert loss.item() == pytest.approx(loop_agg(losses, mask, mode, ragged.WIDTH), rel=1e-12)
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(clipped / int(mask.sum()))
    assert metrics["critic/vpred_mean"].item() == pytest.approx(inputs["vpreds"][mask].mean().item(), rel=1e-6)


def test_value_loss_gradient_against_finite_differences():
    inputs, mask = value_inputs(), ragged.response_mask()

    def loss(vpreds):
        return compute_value_loss(vpreds, inputs["returns"], inputs["values"], mask, 0.2)[0]

    assert torch.autograd.gradcheck(loss, inputs["vpreds"].requires_grad_())


def test_value_loss_does_not_see_masked_slots():
    inputs, mask = value_inputs(), ragged.response_mask()
    results = []
    for make in (torch.clone, lambda x: ragged.poisoned(x, mask)):
        given = {key: make(value) for key, value in inputs.items()}
        given["vpreds"].requires_grad_()
        loss, metrics = compute_value_loss(**given, response_mask=mask, cliprange_value=0.2)
        loss.backward()
        results.append((loss.detach(), given["vpreds"].grad, *metrics.values()))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert bool((results[1][1][~mask] == 0).all())


def test_value_loss_and_metrics_add_up_over_micro_batches():
    inputs, mask = value_inputs(), ragged.response_mask()
    whole, whole_metrics = compute_value_loss(**inputs, response_mask=mask, cliprange_value=0.2)
    denominator = Denominator.from_mask(mask)
    total, summed = 0.0, dict.fromkeys(whole_metrics, 0.0)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 10)):
        part = {key: value[rows] for key, value in inputs.items()}
        loss, metrics = compute_value_loss(
            **part, response_mask=mask[rows], cliprange_value=0.2, denominator=denominator
        )
        total += loss
        summed = {key: summed[key] + metrics[key] for key in summed}
    torch.testing.assert_close(total, whole)
    assert summed.pop("critic/all_masked_micro_batches") == 1.0  # the empty row, alone in its micro-batch
    for key, value in summed.items():
        torch.testing.assert_close(value, whole_metrics[key])


def test_entropy_is_aggregated_like_any_loss_and_reported():
    entropy, mask = normal(6).abs(), ragged.response_mask()
    bonus, metrics = compute_entropy_loss(ragged.poisoned(entropy, mask), mask, "seq-mean-token-mean")
    assert bonus.item() == pytest.approx(loop_agg(entropy, mask, "seq-mean-token-mean", None))
    assert metrics["actor/entropy"].item() == pytest.approx(entropy[mask].mean().item(), rel=1e-6)
