"""The losses that actors and critics minimise; policy losses are in ``policy_losses`` and found here by name."""

from __future__ import annotations

import torch
from torch import Tensor

from podium.trainer.ppo.aggregation import LOSS_AGG_MODES, Denominator, agg_loss, all_masked, token_share
from podium.trainer.ppo.covariance_policy_losses import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from podium.trainer.ppo.policy_losses import (
    POLICY_LOSS_REGISTRY,
    Metrics,
    PolicyLossFn,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from podium.trainer.ppo.sequence_policy_losses import compute_policy_loss_geo_mean, compute_policy_loss_gspo
from podium.trainer.ppo.token_policy_losses import (
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_sapo,
)
from podium.utils.torch_functional import select

__all__ = [
    "LOSS_AGG_MODES",
    "POLICY_LOSS_REGISTRY",
    "Denominator",
    "Metrics",
    "PolicyLossFn",
    "agg_loss",
    "compute_entropy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
    "get_policy_loss_fn",
    "register_policy_loss",
]


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float | None,
    loss_agg_mode: str = "token-mean",
    denominator: Denominator | None = None,
    horizon: int | None = None,
) -> tuple[Tensor, Metrics]:
    """Clipped value loss of PPO: half the aggregate of ``max((v - R)^2, (clip(v, v_old +- range) - R)^2)``.

    Args:
        vpreds: (B, R), the critic's predictions; the gradient flows here.
        returns: (B, R), targets.
        values: (B, R), predictions from before the update.
        response_mask: (B, R), bool or 0/1.
        cliprange_value: how far a prediction may move from ``values``, in units of value; None for no limit.
        loss_agg_mode, denominator, horizon: see ``agg_loss``.

    Returns:
        The loss's share, and the shares ``critic/vf_clipfrac``, ``critic/vpred_mean`` and
        ``critic/all_masked_micro_batches``.
    """
    mask = response_mask.bool()
    vpreds, returns, values = select(mask, vpreds), select(mask, returns), select(mask, values)
    losses = (vpreds - returns).square()
    clipped = torch.zeros_like(mask)
    if cliprange_value is not None:
        near = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
        near_losses = (near - returns).square()
        clipped = near_losses > losses
        losses = torch.maximum(losses, near_losses)
    metrics = {
        "critic/vf_clipfrac": token_share(clipped, mask, denominator),
        "critic/vpred_mean": token_share(vpreds, mask, denominator),
        "critic/all_masked_micro_batches": all_masked(mask),
    }
    return 0.5 * agg_loss(losses, mask, loss_agg_mode, denominator, horizon), metrics


def compute_entropy_loss(
    entropy: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    denominator: Denominator | None = None,
    horizon: int | None = None,
) -> tuple[Tensor, Metrics]:
    """The entropy to subtract from the loss, times ``entropy_coeff``.

    Args:
        entropy: (B, R), nats, from ``entropy_from_logits``.
        response_mask, loss_agg_mode, denominator, horizon: see ``agg_loss``.

    Returns:
        The aggregate's share, and ``actor/entropy``, the token mean's share.
    """
    mask = response_mask.bool()
    bonus = agg_loss(entropy, mask, loss_agg_mode, denominator, horizon)
    return bonus, {"actor/entropy": token_share(entropy, mask, denominator)}
