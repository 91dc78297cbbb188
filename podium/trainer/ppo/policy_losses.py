"""What all policy losses share, the registry that finds them by name, and PPO's own.

Every loss has the signature of ``compute_policy_loss_vanilla`` and returns ``(loss, metrics)``. Loss and metrics are
this micro-batch's shares of the mini-batch (see ``aggregation.agg_loss``): sum them over micro-batches and ranks.
Metrics whose name ends in ``_max`` are max-reduced instead.

``config`` is the actor's configuration, read by attribute: ``clip_ratio`` sets both sides of the clip unless
``clip_ratio_low`` or ``clip_ratio_high`` is given; ``loss_scale_factor`` is the horizon of ``seq-mean-token-sum-norm``.
Options of one loss are looked for in ``policy_loss`` first. Importing ``losses`` registers all that Podium ships.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from podium.trainer.ppo.aggregation import Denominator, agg_loss, all_masked, token_share
from podium.trainer.ppo.registry import Registry
from podium.utils.errors import UserError
from podium.utils.torch_functional import masked_max, select

Metrics = dict[str, Tensor]
PolicyLossFn = Callable[..., tuple[Tensor, Metrics]]
F = TypeVar("F", bound=Callable[..., Any])

POLICY_LOSS_REGISTRY = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")

# exp(20) is 5e8: far beyond any ratio that teaches, and far from float32's overflow, which would turn the loss, and
# through it every weight, into NaN.
MAX_LOG_RATIO = 20.0


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Decorator that makes a loss available as ``actor_rollout_ref.actor.policy_loss.loss_mode=name``."""
    return POLICY_LOSS_REGISTRY.register(name)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss called ``name``; a ``UserError`` with the nearest name if there is none."""
    return POLICY_LOSS_REGISTRY.get(name)


@dataclass(frozen=True)
class Tokens:
    """A micro-batch's inputs, (B, R) each, with everything masked replaced: log-prob 0, ratio 1, advantage 0, weight 0.

    All that follows is then finite in masked slots, in value and in gradient, whatever they held.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None
    denominator: Denominator | None

    @classmethod
    def of(
        cls,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        weights: Tensor | None,
        denominator: Denominator | None,
    ) -> Tokens:
        mask = response_mask.bool()
        log_prob, old_log_prob = select(mask, log_prob), select(mask, old_log_prob)
        return cls(
            log_prob=log_prob,
            old_log_prob=old_log_prob,
            log_ratio=(log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
            advantages=select(mask, advantages),
            mask=mask,
            weights=None if weights is None else select(mask, weights).detach(),
            denominator=denominator,
        )

    def aggregate(self, losses: Tensor, loss_agg_mode: str, config: Any) -> Tensor:
        """Weighted by the rollout correction, reduced to this micro-batch's share."""
        weighted = losses if self.weights is None else losses * self.weights
        return agg_loss(
            weighted, self.mask, loss_agg_mode, self.denominator, horizon=option(config, "loss_scale_factor")
        )

    def share(self, values: Tensor) -> Tensor:
        return token_share(values, self.mask, self.denominator)

    def metrics(self, clipped: Tensor | None = None, clipped_lower: Tensor | None = None) -> Metrics:
        """The metrics that every loss reports; ``clipped`` marks the tokens that a clip holds back."""
        deviation = (self.log_ratio.detach().exp() - 1).abs()
        metrics = {
            "actor/ppo_kl": self.share(-self.log_ratio),
            "actor/ratio_dev_max": masked_max(deviation, self.mask).float(),
            "actor/all_masked_micro_batches": all_masked(self.mask),
        }
        if clipped is not None:
            metrics["actor/pg_clipfrac"] = self.share(clipped)
        if clipped_lower is not None:
            metrics["actor/pg_clipfrac_lower"] = self.share(clipped_lower)
        return metrics


def option(config: Any, name: str, default: Any = None) -> Any:
    """``config.policy_loss.name`` or else ``config.name``; ``default`` where neither is there or both are None."""
    for owner in (getattr(config, "policy_loss", None), config):
        value = getattr(owner, name, None)
        if value is not None:
            return value
    return default


def clip_range(config: Any) -> tuple[float, float]:
    """``(low, high)`` widths of the clip, both positive: the ratio is kept in [1 - low, 1 + high]."""
    both = option(config, "clip_ratio", 0.2)
    return option(config, "clip_ratio_low", both), option(config, "clip_ratio_high", both)


def dual_clip(config: Any) -> float:
    """``clip_ratio_c``, the cap on the ratio of tokens with a negative advantage."""
    cap = option(config, "clip_ratio_c", 3.0)
    if cap <= 1.0:
        raise UserError(f"actor.clip_ratio_c is {cap}; expected more than 1, the ratio of an unchanged policy")
    return cap


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate (arXiv 1707.06347), two clip widths (arXiv 2503.14476) and dual clip (arXiv 1912.09729).

    Per token, with r = exp(log_prob - old_log_prob): ``max(-A r, -A clip(r, 1-low, 1+high))``, and for A < 0 no more
    than ``-A c``, so that a token whose probability exploded cannot dominate the batch.

    Args:
        old_log_prob: (B, R), of the policy that made the advantages; rollout log-probs in bypass mode.
        log_prob: (B, R), of the policy being trained; the gradient flows here.
        advantages: (B, R).
        response_mask: (B, R), bool or 0/1.
        loss_agg_mode: see ``agg_loss``.
        config: actor configuration; reads clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c.
        rollout_is_weights: (B, R), importance weights of the rollout correction; constants.
        denominator: counts of the mini-batch over all ranks; None if this is all of it.

    Returns:
        The loss's share, and ``actor/pg_clipfrac``, ``actor/pg_clipfrac_lower`` (dual clip), ``actor/ppo_kl`` (mean of
        old - new), ``actor/ratio_dev_max`` (largest |r - 1|), ``actor/all_masked_micro_batches``.
    """
    low, high = clip_range(config)
    cap = dual_clip(config)
    tok = Tokens.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, denominator)
    ratio = tok.log_ratio.exp()
    plain = -tok.advantages * ratio
    clipped = -tok.advantages * ratio.clamp(1 - low, 1 + high)
    ppo = torch.maximum(plain, clipped)
    ceiling = -tok.advantages * cap
    negative = tok.advantages < 0
    losses = torch.where(negative, torch.minimum(ppo, ceiling), ppo)
    metrics = tok.metrics(clipped > plain, negative & (ppo > ceiling))
    return tok.aggregate(losses, loss_agg_mode, config), metrics
