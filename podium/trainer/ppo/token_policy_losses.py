"""Policy losses in which each token stands for itself; arguments and results as ``compute_policy_loss_vanilla``'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from podium.trainer.ppo.aggregation import Denominator
from podium.trainer.ppo.policy_losses import Metrics, Tokens, clip_range, dual_clip, option, register_policy_loss
from podium.utils.errors import UserError
from podium.utils.torch_functional import select


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """GPG (arXiv 2504.02546): the plain policy gradient, ``-A log_prob``; no ratio, no clip."""
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    return tok.aggregate(-tok.advantages * tok.log_prob, loss_agg_mode, config), tok.metrics()


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): ``-sg(clip(r, 1-low, 1+high)) A log_prob``.

    The clip bounds a token's weight and never its gradient, so that rare tokens go on learning.
    ``actor/pg_clipfrac`` is the share of tokens whose weight was clipped.

    """
    low, high = clip_range(config)
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    ratio = tok.log_ratio.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    losses = -weight * tok.advantages * tok.log_prob
    return tok.aggregate(losses, loss_agg_mode, config), tok.metrics(weight != ratio)


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """SAPO (arXiv 2511.20347): a soft gate instead of a clip, ``-A (4 / tau) sigmoid(tau (r - 1))``.

    The gate's slope is 1 at r = 1 and fades on both sides. tau is ``tau_pos`` (1.0) where A > 0 and ``tau_neg`` (1.05)
    elsewhere. The paper averages as ``seq-mean-token-mean``.

    """
    tau_pos, tau_neg = option(config, "tau_pos", 1.0), option(config, "tau_neg", 1.05)
    for key, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise UserError(f"actor.{key} is {tau}; expected a positive temperature")
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    tau = select(tok.advantages > 0, torch.full_like(tok.advantages, tau_pos), tau_neg)
    gate = torch.sigmoid(tau * (tok.log_ratio.exp() - 1)) * (4 / tau)
    return tok.aggregate(-tok.advantages * gate, loss_agg_mode, config), tok.metrics()


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """DRO (arXiv 2405.19107): ``-(A log_prob - beta/2 (log_prob - old_log_prob)^2)``, beta is ``policy_loss.dro_beta``.

    Off-policy without a ratio: the square pulls the policy back to the one that sampled.

    """
    beta = option(config, "dro_beta")
    if beta is None or not beta > 0:
        raise UserError(f"actor.policy_loss.dro_beta is {beta}; loss_mode=dro needs a positive number")
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    losses = 0.5 * beta * tok.log_ratio.square() - tok.advantages * tok.log_prob
    return tok.aggregate(losses, loss_agg_mode, config), tok.metrics()


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """DPPO, total variation (arXiv 2602.04879): ``-A sg(min(r, c)) log_prob`` in a trust region of each token's own.

    A token is dropped once its probability has moved by more than ``clip_ratio_high`` (``clip_ratio_low`` for A <= 0)
    in the direction of the advantage. These are differences of probabilities, not of ratios. c is ``clip_ratio_c``; the
    paper takes it large (20). ``actor/pg_clipfrac`` is the share of tokens dropped.

    """
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    low, high = clip_range(config)
    moved = tok.log_prob.detach().exp() - tok.old_log_prob.exp()
    inside = torch.where(tok.advantages > 0, moved <= high, moved >= -low)
    return _dppo(tok, inside, loss_agg_mode, config)


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """DPPO with the KL trust region of each token (arXiv 2602.04879): as ``dppo_tv``, with another measure.

    A token is dropped once KL(Bernoulli(p_old) || Bernoulli(p)) exceeds ``clip_ratio_high`` (``clip_ratio_low`` for
    A <= 0), in nats, having moved in the direction of the advantage.

    """
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    low, high = clip_range(config)
    prob, old_prob = tok.log_prob.detach().exp(), tok.old_log_prob.exp()
    kl = _binary_kl(old_prob, prob)
    inside = torch.where(tok.advantages > 0, (kl <= high) | (prob <= old_prob), (kl <= low) | (prob >= old_prob))
    return _dppo(tok, inside, loss_agg_mode, config)


def _dppo(tok: Tokens, inside: Tensor, loss_agg_mode: str, config: Any) -> tuple[Tensor, Metrics]:
    cap = dual_clip(config)
    ratio = tok.log_ratio.detach().exp()
    losses = -tok.advantages * ratio.clamp(max=cap) * tok.log_prob
    kept = torch.where(inside, losses, torch.zeros_like(losses))
    return tok.aggregate(kept, loss_agg_mode, config), tok.metrics(~inside, inside & (ratio > cap))


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(Bernoulli(p) || Bernoulli(q)); q kept a rounding error away from 0 and 1, where it would be infinite."""
    q = q.clamp(1e-8, 1 - 1e-7)
    entropy_part = torch.special.xlogy(p, p) + torch.special.xlogy(1 - p, 1 - p)
    return entropy_part - torch.special.xlogy(p, q) - torch.special.xlogy(1 - p, 1 - q)
