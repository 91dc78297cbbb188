"""Masked reductions, and log-probabilities and entropies of large logits.

Masks are bool or 0/1. Masked slots are selected out (``torch.where``), never multiplied by zero, so that a NaN or inf
left in one of them reaches neither a value nor a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Logits elements held in float32 at once; 2**24 of them are 64 MiB.
_CHUNK_ELEMENTS = 2**24
# Elements of a block of rows in the passes over (B, R) matrices: 2 MiB in float64.
_BLOCK_ELEMENTS = 2**18


@dataclass(frozen=True)
class Denominator:
    """What a mini-batch is divided by: sums over all its micro-batches on every data-parallel rank.

    ``sequences`` counts the rows with at least one valid token.
    """

    tokens: float
    sequences: float

    @classmethod
    def from_mask(cls, response_mask: Tensor) -> Denominator:
        """Counts of one mask, (B, R); add the ranks' counts to get the mini-batch's."""
        mask = response_mask.bool()
        return cls(tokens=float(mask.sum()), sequences=float(mask.any(dim=-1).sum()))

    def __add__(self, other: Denominator) -> Denominator:
        return Denominator(self.tokens + other.tokens, self.sequences + other.sequences)


def select(mask: Tensor, values: Tensor, fill: float = 0.0) -> Tensor:
    """``values`` where ``mask`` is set, ``fill`` elsewhere; shapes broadcast."""
    return torch.where(mask.bool(), values, torch.as_tensor(fill, dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the valid slots, over everything or along ``dim``; 0 where there is none."""
    kept = select(mask, values)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | None = None, denominator: float | Tensor | None = None
) -> Tensor:
    """Mean of the valid slots; 0 where there is none.

    ``denominator`` replaces the count of valid slots, which turns the mean into this part's share of a larger one.
    """
    if denominator is None:
        denominator = (mask.sum() if dim is None else mask.sum(dim=dim)).clamp(min=1)
    return masked_sum(values, mask, dim) / denominator


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the valid slots, with Bessel's correction if ``unbiased``; 0 for fewer than two slots."""
    count = mask.sum()
    centred = select(mask, values - masked_mean(values, mask))
    return centred.square().sum() / (count - int(unbiased)).clamp(min=1)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest valid slot; 0 if there is none."""
    largest = select(mask, values, float("-inf")).amax()
    return torch.where(mask.any(), largest, torch.zeros_like(largest))


@torch.no_grad()
def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """``values`` (B, R) at mean 0 and variance 1 over the valid slots; masked slots become 0. No gradient.

    With ``shift_mean=False`` the mean is kept and only the scale changes. A constant input becomes 0, not NaN.
    """
    blocks = row_blocks(values)
    count = mask.bool().sum().clamp(min=1)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    squares = torch.zeros_like(total)
    for rows in blocks:
        total += masked_sum(values[rows].double(), mask[rows])
    mean = total / count
    for rows in blocks:
        squares += select(mask[rows], values[rows].double() - mean).square().sum()
    scale = torch.rsqrt(squares / (count - 1).clamp(min=1) + epsilon)
    mean, scale = mean.to(values.dtype), scale.to(values.dtype)
    out = torch.empty_like(values)
    for rows in blocks:
        scaled = (values[rows] - mean) * scale
        out[rows] = select(mask[rows], scaled if shift_mean else scaled + mean)
    return out


def row_blocks(matrix: Tensor) -> list[slice]:
    """Row ranges of a matrix small enough for a pass's temporaries to stay in cache instead of going to memory."""
    step = max(1, _BLOCK_ELEMENTS // max(1, matrix.shape[-1]))
    return [slice(start, start + step) for start in range(0, matrix.shape[0], step)]


@torch.no_grad()
def place_on_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Each response's score on its last valid token, 0 elsewhere; a response without one carries no reward.

    Args:
        scores: (B,), float.
        response_mask: (B, R), bool or 0/1; gaps are allowed.

    Returns:
        (B, R), float32.
    """
    mask = response_mask.bool()
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, -1).amax(dim=-1, keepdim=True)
    return torch.where(position == last, scores.float().unsqueeze(-1), 0.0)


def take_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """The value at each row's last valid slot, (B, R) -> (B,), differentiable; 0 where there is none."""
    mask = mask.bool()
    last = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).amax(dim=-1, keepdim=True)
    return select(mask.any(dim=-1), values.gather(1, last).squeeze(1))


def logit_rows(flat: Tensor) -> list[slice]:
    """Row ranges of (rows, vocab) logits with about 2**24 elements each: a pass in float32 needs 64 MiB at once."""
    step = max(1, _CHUNK_ELEMENTS // max(1, flat.shape[-1]))
    return [slice(start, start + step) for start in range(0, flat.shape[0], step)]


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label, ``logits[label] - logsumexp(logits)``, without a second tensor of logits' size.

    Args:
        logits: (..., vocab), any floating type, already divided by the sampling temperature.
        labels: (...), int64 in [0, vocab).

    Returns:
        (...), float32 (float64 for float64 logits), differentiable in ``logits``.
    """
    return _LogProbs.apply(logits, labels)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of each categorical, (..., vocab) -> (...), float32; tokens at -inf count as probability 0."""
    return _Entropy.apply(logits)


@torch.no_grad()
def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Collision probability, the sum over the vocabulary of p squared, (..., vocab) -> (...), float32, no gradient."""
    flat = logits.reshape(-1, logits.shape[-1])
    out = torch.empty(flat.shape[0], dtype=_compute_dtype(logits), device=logits.device)
    for rows in logit_rows(flat):
        part = flat[rows].to(out.dtype)
        out[rows] = torch.exp(torch.logsumexp(2 * part, dim=-1) - 2 * torch.logsumexp(part, dim=-1))
    return out.view(logits.shape[:-1])


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


class _LogProbs(torch.autograd.Function):
    """Keeps the logits as they came and one float a token for backward; autograd's own would keep a float32 copy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        flat, index = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1, 1)
        lse = torch.empty(flat.shape[0], dtype=_compute_dtype(logits), device=logits.device)
        for rows in logit_rows(flat):
            lse[rows] = torch.logsumexp(flat[rows].to(lse.dtype), dim=-1)
        ctx.save_for_backward(logits, labels, lse)
        return (flat.gather(-1, index).squeeze(-1).to(lse.dtype) - lse).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        logits, labels, lse = ctx.saved_tensors
        flat, index, grad = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1, 1), grads[0].reshape(-1, 1)
        out = torch.empty_like(flat)
        for rows in logit_rows(flat):
            part = (flat[rows].to(lse.dtype) - lse[rows, None]).exp_().mul_(-grad[rows])
            out[rows] = part.scatter_add_(-1, index[rows], grad[rows].to(part.dtype))
        return out.view(logits.shape), None


class _Entropy(torch.autograd.Function):
    """dH/dx_j = -p_j (log p_j + H); the probabilities are made again in backward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        entropy = torch.empty(flat.shape[0], dtype=_compute_dtype(logits), device=logits.device)
        for rows in logit_rows(flat):
            entropy[rows] = torch.special.entr(torch.softmax(flat[rows].to(entropy.dtype), dim=-1)).sum(-1)
        ctx.save_for_backward(logits, entropy)
        return entropy.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        logits, entropy = ctx.saved_tensors
        flat, grad = logits.reshape(-1, logits.shape[-1]), grads[0].reshape(-1, 1)
        out = torch.empty_like(flat)
        for rows in logit_rows(flat):
            probs = torch.softmax(flat[rows].to(entropy.dtype), dim=-1)
            out[rows] = (torch.special.entr(probs) - probs * entropy[rows, None]) * grad[rows]
        return (out.view(logits.shape),)
