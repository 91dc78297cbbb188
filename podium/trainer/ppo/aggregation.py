"""From a per-token loss to a scalar whose denominator is the whole mini-batch's, on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from podium.trainer.ppo.registry import unknown_name
from podium.utils.torch_functional import Denominator, masked_sum

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    denominator: Denominator | None = None,
    horizon: int | None = None,
) -> Tensor:
    """Reduce a per-token loss to a scalar.

    With a denominator the result is this micro-batch's share: the shares of all micro-batches and ranks add up to the
    mini-batch loss, however it was split. Without one, the mask itself is the whole mini-batch. No valid token gives
    a 0 that still has a graph.

    Args:
        loss_mat: (B, R).
        loss_mask: (B, R), bool or 0/1.
        loss_agg_mode: ``token-mean`` (DAPO, arXiv 2503.14476), ``token-sum``, ``seq-mean-token-sum``,
            ``seq-mean-token-mean`` (GRPO, arXiv 2402.03300) or ``seq-mean-token-sum-norm`` (Dr.GRPO, arXiv 2503.20783).
        denominator: counts of the mini-batch over all ranks.
        horizon: tokens that ``seq-mean-token-sum-norm`` divides by; R if None. Give it where R differs between
            micro-batches, or the loss depends on how they were cut.

    Raises:
        UserError: unknown mode.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    mask = loss_mask.bool()
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, mask)
    if loss_agg_mode == "token-mean":
        return masked_sum(loss_mat, mask) / token_count(mask, denominator)
    per_row = masked_sum(loss_mat, mask, dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        per_row = per_row / mask.sum(dim=-1).clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        per_row = per_row / (horizon if horizon is not None else loss_mask.shape[-1])
    return per_row.sum() / sequence_count(mask, denominator)


def token_count(mask: Tensor, denominator: Denominator | None) -> float | Tensor:
    """Valid tokens of the mini-batch, at least 1."""
    return mask.sum().clamp(min=1) if denominator is None else max(denominator.tokens, 1.0)


def sequence_count(mask: Tensor, denominator: Denominator | None) -> float | Tensor:
    """Rows of the mini-batch with a valid token, at least 1."""
    return mask.any(dim=-1).sum().clamp(min=1) if denominator is None else max(denominator.sequences, 1.0)


@torch.no_grad()
def token_share(values: Tensor, mask: Tensor, denominator: Denominator | None) -> Tensor:
    """This micro-batch's share of the mini-batch's token mean of ``values``: a metric, 0-dim, detached."""
    return masked_sum(values.float(), mask) / token_count(mask, denominator)


@torch.no_grad()
def all_masked(mask: Tensor) -> Tensor:
    """1.0 if no token is valid, else 0.0; summed over micro-batches it counts those that taught nothing."""
    return (~mask.any()).float()
