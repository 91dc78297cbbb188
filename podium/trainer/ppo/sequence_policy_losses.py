"""Policy losses with one ratio a response; arguments and results as ``compute_policy_loss_vanilla``'s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from podium.trainer.ppo.aggregation import Denominator
from podium.trainer.ppo.policy_losses import MAX_LOG_RATIO, Metrics, Tokens, clip_range, register_policy_loss
from podium.utils.torch_functional import masked_mean, select


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """GSPO (arXiv 2507.18071): PPO's clip on ``s = exp(mean_t log r_t)``, a response's geometric mean ratio.

    In the per-token form (GSPO-token) ``s_t = sg(s) exp(log_prob - sg(log_prob))``: the same value, and for advantages
    that are equal along a response the same gradient. The paper averages as ``seq-mean-token-mean`` and clips at a few
    1e-4. ``actor/ratio_dev_max`` and ``actor/ppo_kl`` are still of single tokens.

    """
    low, high = clip_range(config)
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    mean_log_ratio = masked_mean(tok.log_ratio, tok.mask, dim=-1).detach().unsqueeze(-1)
    ratio = (mean_log_ratio + (tok.log_prob - tok.log_prob.detach())).exp()
    plain = -tok.advantages * ratio
    clipped = -tok.advantages * ratio.clamp(1 - low, 1 + high)
    return tok.aggregate(torch.maximum(plain, clipped), loss_agg_mode, config), tok.metrics(clipped > plain)


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """GMPO (arXiv 2507.20673): ``-A exp(mean_t log r_t)`` with each token's log ratio clipped to [-low, high].

    The clip acts on log ratios, before the mean, and only where it lowers the objective; A is the response's mean
    advantage. The paper clips at 0.4 on both sides and averages as ``seq-mean-token-mean``; other modes weight the same
    responses by their lengths. A correction weight enters as the response's geometric mean.
    ``actor/pg_clipfrac`` is the share of tokens clipped with A > 0, ``actor/pg_clipfrac_lower`` with A < 0.

    """
    low, high = clip_range(config)
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    sign = tok.advantages.sign()
    limited = tok.log_ratio.clamp(-low, high)
    log_ratio = sign * torch.minimum(sign * tok.log_ratio, sign * limited)
    ratio = masked_mean(log_ratio, tok.mask, dim=-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = -masked_mean(tok.advantages, tok.mask, dim=-1) * ratio
    if tok.weights is not None:
        log_weights = select(tok.mask, tok.weights, 1.0).log()  # a weight of 0 rejects the response: exp(-inf) is 0
        tok = replace(tok, weights=masked_mean(log_weights, tok.mask, dim=-1).exp().unsqueeze(-1))
    outside = tok.log_ratio != limited
    metrics = tok.metrics(outside & (tok.advantages > 0), outside & (tok.advantages < 0))
    return tok.aggregate(losses.unsqueeze(-1).expand_as(tok.mask), loss_agg_mode, config), metrics
