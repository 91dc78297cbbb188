"""Policy losses that hold back the tokens which cost the most entropy (arXiv 2505.22617).

Those are the tokens with a high covariance of advantage and log-probability. The covariance is centred on the means of
the micro-batch, and a share of its tokens is chosen, so these two losses, alone among all, depend on how a mini-batch
is cut. Arguments and results as ``compute_policy_loss_vanilla``'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from podium.trainer.ppo.aggregation import Denominator
from podium.trainer.ppo.policy_losses import Metrics, Tokens, clip_range, option, register_policy_loss
from podium.utils.errors import UserError
from podium.utils.torch_functional import masked_mean


@register_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """Clip-Cov: no gradient for a random ``clip_cov_ratio`` (2e-4) of all tokens, drawn from a band of covariance.

    The band is (``clip_cov_lb``, ``clip_cov_ub``), 1 to 5; tokens that PPO's clip holds back already are not drawn. At
    least one is, if there is any in the band. ``actor/pg_clipfrac`` is the share drawn. Draws come from torch's
    generator.

    """
    low, high = clip_range(config)
    share = _share(config, "clip_cov_ratio")
    lower, upper = option(config, "clip_cov_lb", 1.0), option(config, "clip_cov_ub", 5.0)
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    ratio = tok.log_ratio.exp()
    plain = -tok.advantages * ratio
    clipped = -tok.advantages * ratio.clamp(1 - low, 1 + high)
    covariance = _covariance(tok)
    band = tok.mask & (clipped <= plain) & (covariance > lower) & (covariance < upper)
    candidates = torch.nonzero(band.flatten()).squeeze(-1)
    order = torch.randperm(candidates.numel(), device=candidates.device)
    drawn = torch.zeros_like(tok.mask).flatten()
    drawn[candidates[order[: max(1, int(share * int(tok.mask.sum())))]]] = True
    drawn = drawn.view_as(tok.mask)
    losses = torch.where(drawn, torch.zeros_like(plain), torch.maximum(plain, clipped))
    return tok.aggregate(losses, loss_agg_mode, config), tok.metrics(drawn)


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """KL-Cov: ``-A r``, plus ``ppo_kl_coef |log r|`` for the ``kl_cov_ratio`` of tokens with the highest covariance.

    No clip. Defaults 2e-4 and 0.1; at least one token is penalised. ``actor/pg_clipfrac`` is the share penalised.

    """
    share, coefficient = _share(config, "kl_cov_ratio"), option(config, "ppo_kl_coef", 0.1)
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    covariance = torch.where(tok.mask, _covariance(tok), float("-inf")).flatten()
    count = min(max(1, int(share * int(tok.mask.sum()))), covariance.numel())
    top = torch.zeros_like(tok.mask).flatten()
    top[covariance.topk(count).indices] = True
    top = top.view_as(tok.mask) & tok.mask
    losses = -tok.advantages * tok.log_ratio.exp()
    penalised = torch.where(top, losses + coefficient * tok.log_ratio.abs(), losses)
    return tok.aggregate(penalised, loss_agg_mode, config), tok.metrics(top)


def _share(config: Any, key: str) -> float:
    share = option(config, key, 2e-4)
    if not 0 < share <= 1:
        raise UserError(f"actor.policy_loss.{key} is {share}; expected a share of tokens, above 0 and at most 1")
    return share


@torch.no_grad()
def _covariance(tok: Tokens) -> Tensor:
    """Each token's contribution to the covariance of advantage and log-probability, (B, R)."""
    return (tok.advantages - masked_mean(tok.advantages, tok.mask)) * (
        tok.log_prob - masked_mean(tok.log_prob, tok.mask)
    )
