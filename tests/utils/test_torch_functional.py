import math
import subprocess
import sys

import pytest
import torch

from podium.utils.torch_functional import (
    entropy_from_logits,
    logprobs_from_logits,
    masked_max,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    sum_pi_squared_from_logits,
)

VALUES = torch.tensor(
    [[1.0, math.nan, 4.0], [math.inf, math.inf, math.nan], [-2.0, 3.0, math.nan]], dtype=torch.float64
)
MASK = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]])
KEPT = [1.0, 4.0, -2.0, 3.0]


def test_reductions_see_valid_slots_only():
    assert masked_sum(VALUES, MASK).item() == 6.0
    assert masked_sum(VALUES, MASK, dim=-1).tolist() == [5.0, 0.0, 1.0]
    assert masked_mean(VALUES, MASK).item() == 1.5
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [2.5, 0.0, 0.5]
    assert masked_mean(VALUES, MASK, denominator=12.0).item() == 0.5
    assert masked_max(VALUES, MASK).item() == 4.0
    squares = sum((x - 1.5) ** 2 for x in KEPT)
    assert masked_var(VALUES, MASK).item() == pytest.approx(squares / 3)
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(squares / 4)


def test_nothing_valid_is_zero():
    none = torch.zeros_like(MASK)
    for function in (masked_sum, masked_mean, masked_var, masked_max):
        assert function(VALUES, none).item() == 0.0
    assert bool((masked_whiten(VALUES, none) == 0).all())


def test_gradient_is_zero_where_masked_and_never_nan():
    values = VALUES.clone().requires_grad_()
    masked_mean(values, MASK).backward()
    assert values.grad.tolist() == (MASK / 4).tolist()


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitened_values_have_mean_zero_or_kept_and_variance_one(shift_mean):
    white = masked_whiten(VALUES, MASK, shift_mean=shift_mean)
    kept = white[MASK.bool()]
    assert kept.mean().item() == pytest.approx(0.0 if shift_mean else 1.5, abs=1e-9)
    assert kept.var().item() == pytest.approx(1.0)
    assert bool((white[~MASK.bool()] == 0).all())


def test_whitening_is_exact_in_float32_far_from_zero_and_over_many_blocks():
    torch.manual_seed(0)
    values = 1000 + torch.randn(700, 1000)
    mask = torch.rand(700, 1000) < 0.5
    kept = masked_whiten(values, mask)[mask].double()
    assert abs(kept.mean().item()) < 1e-4 and abs(kept.var().item() - 1) < 1e-4


def test_a_constant_or_a_single_value_becomes_zero():
    assert masked_whiten(torch.full((2, 3), 7.0), torch.ones(2, 3)).abs().max().item() == 0.0
    assert masked_whiten(VALUES, torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 0]])).abs().max().item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_are_log_softmax_at_the_label(dtype):
    torch.manual_seed(0)
    logits, labels = (3 * torch.randn(2, 5, 11, dtype=torch.float64)).to(dtype), torch.randint(11, (2, 5))
    expected = torch.log_softmax(logits.double(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    got = logprobs_from_logits(logits, labels)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [2**24, 30])
def test_gradients_against_finite_differences(monkeypatch, chunk):
    monkeypatch.setattr("podium.utils.torch_functional._CHUNK_ELEMENTS", chunk)
    torch.manual_seed(1)
    logits, labels = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True), torch.randint(7, (2, 4))
    assert torch.autograd.gradcheck(lambda x: logprobs_from_logits(x, labels), logits)
    assert torch.autograd.gradcheck(entropy_from_logits, logits)


def test_logprob_gradient_keeps_the_logits_type():
    logits = torch.randn(3, 9, dtype=torch.bfloat16, requires_grad=True)
    logprobs_from_logits(logits, torch.tensor([0, 1, 2])).sum().backward()
    assert logits.grad.dtype == torch.bfloat16 and bool(torch.isfinite(logits.grad).all())


def test_entropy_counts_impossible_tokens_as_nothing():
    logits = torch.tensor([[0.0, 0.0, -math.inf], [5.0, -math.inf, -math.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    torch.testing.assert_close(entropy, torch.tensor([math.log(2), 0.0]))
    entropy.sum().backward()
    assert bool(torch.isfinite(logits.grad).all())


def test_sum_pi_squared():
    logits = torch.randn(2, 3, 8)
    torch.testing.assert_close(sum_pi_squared_from_logits(logits), torch.softmax(logits, -1).square().sum(-1))


def test_logprobs_need_no_second_copy_of_the_logits():
    """Forward and backward of 256 MiB of bfloat16 logits: the gradient, and chunks of float32, but no float32 copy."""
    code = """
import resource, torch
from podium.utils.torch_functional import logprobs_from_logits
logits = torch.zeros(1024, 131072, dtype=torch.bfloat16, requires_grad=True)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
logprobs_from_logits(logits, torch.zeros(1024, dtype=torch.int64)).sum().backward()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    # 256 MiB of gradient and two or three chunks of 64 MiB; float32 logits and their gradient alone would be 1024 MiB.
    assert int(done.stdout) < 640
