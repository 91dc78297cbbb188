"""KL to the reference policy: per-token estimators, in the reward or in the loss, and the coefficient's controllers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from podium.trainer.ppo.aggregation import Denominator, agg_loss, token_share
from podium.trainer.ppo.registry import unknown_name
from podium.utils.errors import UserError
from podium.utils.torch_functional import masked_mean, select

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens sampled by the policy.

    With d = logprob - ref_logprob: ``kl``/``k1`` is d, ``abs`` is |d|, ``mse``/``k2`` is d^2/2, ``low_var_kl``/``k3``
    is exp(-d) + d - 1 (Schulman, "Approximating KL Divergence", 2020). k1 and k3 are unbiased as *values*. As *losses*
    they are not: in expectation k1's gradient is 0 and k3's is that of KL(reference || policy). k2's gradient,
    d * grad(logprob), is in expectation that of KL(policy || reference). A trailing "+" (``k1+``, ``k3+``, ...) keeps
    the named value and takes k2's gradient.

    ``full`` is the exact sum over the vocabulary; it wants whole distributions (logits or log-probs), (..., vocab).

    k3's exponent is limited to +-20 and its value to 10, so that one token cannot overflow the loss.

    Args:
        logprob: (...), or (..., vocab) for ``full``; the gradient flows here.
        ref_logprob: like ``logprob``.
        kind: one of the names above.

    Returns:
        (...), the type of ``logprob``.

    Raises:
        UserError: unknown kind.
    """
    base = kind.removesuffix("+")
    if base not in KL_KINDS:
        raise unknown_name("KL estimator", kind, KL_KINDS)
    if base == "full":  # exact in value and gradient, so "+" adds nothing
        log_p, log_q = torch.log_softmax(logprob, dim=-1), torch.log_softmax(ref_logprob, dim=-1)
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    diff = logprob - ref_logprob
    value = _kl_value(diff, base)
    if not kind.endswith("+"):
        return value
    unbiased = 0.5 * diff.square()
    return value.detach() + (unbiased - unbiased.detach())


def _kl_value(diff: Tensor, base: str) -> Tensor:
    if base in ("kl", "k1"):
        return diff
    if base == "abs":
        return diff.abs()
    if base in ("mse", "k2"):
        return 0.5 * diff.square()
    limited = diff.clamp(-20.0, 20.0)
    # expm1 keeps the digits where the two policies nearly agree and exp(-d) + d - 1 would cancel.
    return (torch.expm1(-limited) + limited).clamp(max=10.0)


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: Tensor,
    log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kind: str = "kl",
) -> tuple[Tensor, Tensor]:
    """KL in the reward: ``token_level_rewards = token_level_scores - kl_coef * kl``, per token (arXiv 1909.08593).

    Args:
        token_level_scores, log_probs, ref_log_prob, response_mask: (B, R).
        kl_coef: the controller's current value.
        kind: see ``kl_penalty``.

    Returns:
        Rewards (B, R), 0 in masked slots; and the mean over non-empty rows of each row's token mean of the KL, 0-dim:
        what the controller is updated with.
    """
    mask = response_mask.bool()
    kl = select(mask, kl_penalty(select(mask, log_probs), select(mask, ref_log_prob), kind))
    rewards = select(mask, token_level_scores) - kl_coef * kl
    return rewards, masked_mean(masked_mean(kl, mask, dim=-1), mask.any(dim=-1))


def compute_kl_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kind: str = "low_var_kl",
    loss_agg_mode: str = "token-mean",
    denominator: Denominator | None = None,
    horizon: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL in the loss (GRPO, arXiv 2402.03300), to be added times ``kl_loss_coef``.

    Args:
        log_prob, ref_log_prob, response_mask: (B, R); the gradient flows into ``log_prob``.
        kind: see ``kl_penalty``; a "+" form has the KL's own gradient in expectation.
        loss_agg_mode, denominator, horizon: see ``agg_loss``.

    Returns:
        The loss's share, and ``actor/kl_loss``, the same detached; ``actor/ref_kl`` is the token mean's share.
    """
    mask = response_mask.bool()
    # Selected before the estimator: afterwards a NaN in a masked slot would still reach the gradient as 0 * NaN.
    kl = kl_penalty(select(mask, log_prob), select(mask, ref_log_prob), kind)
    loss = agg_loss(kl, mask, loss_agg_mode, denominator, horizon)
    return loss, {"actor/kl_loss": loss.detach(), "actor/ref_kl": token_share(kl, mask, denominator)}


class FixedKLController:
    """A coefficient that stays as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing; here so that both controllers are called alike."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes up the coefficient of a checkpoint."""
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """Moves the coefficient so as to hold ``target_kl``, by at most 20% a horizon (arXiv 1909.08593).

    Args:
        init_kl_coef: coefficient to start from.
        target_kl: KL to hold, nats per token as ``apply_kl_penalty`` reports it.
        horizon: samples over which the coefficient may change by the full error.

    Raises:
        UserError: a target or horizon that is not positive.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(init_kl_coef)
        for key, number in (("target_kl", target_kl), ("horizon", horizon)):
            if not number > 0:
                raise UserError(f"algorithm.kl_ctrl.{key} is {number}; expected a positive number")
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """One step: ``current_kl`` as measured over ``n_steps`` samples."""
        # A NaN would stay in the coefficient, and in every checkpoint, for the rest of the run.
        if not math.isfinite(current_kl):
            return
        error = min(max(float(current_kl) / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: Any) -> FixedKLController:
    """The controller of ``algorithm.kl_ctrl``: attributes type (fixed | adaptive), kl_coef, target_kl, horizon."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise unknown_name("algorithm.kl_ctrl.type", kl_ctrl.type, ("fixed", "adaptive"))
