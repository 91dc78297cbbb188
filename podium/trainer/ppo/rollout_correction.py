"""Correction for a rollout whose probabilities differ from the trainer's (other kernels, precision, older weights).

``rho = pi_train / pi_rollout`` of the sampled tokens, from old and rollout log-probs. Weights (importance sampling)
multiply the policy loss; rejection takes tokens or responses out of the mask. Both may be used together. In bypass
mode neither is needed: the rollout's log-probs are taken as old log-probs, and the loss's own ratio corrects.

Sources: Liu et al., "When Speed Kills Stability" (2025, richardli.xyz/rl-collapse); truncated importance sampling, Yao
et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); IcePop, arXiv 2510.18855.
"""

from __future__ import annotations

import torch
from torch import Tensor

from podium.trainer.ppo.registry import unknown_name
from podium.utils.errors import UserError
from podium.utils.torch_functional import masked_max, masked_mean, masked_sum, select

IS_LEVELS = ("token", "sequence")
RS_KINDS = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
)

# As in the policy losses: far beyond any useful ratio, far from overflow.
_MAX_LOG_RATIO = 20.0

Band = float | str


@torch.no_grad()
def compute_rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Band = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Band | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights, mask and metrics of a whole batch.

    Args:
        old_log_probs, rollout_log_probs, response_mask: (B, R).
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize: see ``rollout_is_weights``; None gives no weights.
        rollout_rs, rollout_rs_threshold: see ``rejection_mask``; None rejects nothing.

    Returns:
        Weights (B, R) or None; the mask (B, R) bool of tokens that are left; metrics under ``rollout_corr/``.
    """
    mask = response_mask.bool()
    log_ratio = select(mask, old_log_probs) - select(mask, rollout_log_probs)
    metrics = mismatch_metrics(log_ratio, mask)
    weights, kept = None, mask
    if rollout_is is not None:
        weights, is_metrics = rollout_is_weights(
            log_ratio, mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= is_metrics
    if rollout_rs is not None:
        kept = rejection_mask(log_ratio, mask, rollout_rs, rollout_rs_threshold)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = float(masked_mean((~kept).float(), mask))
        lost = mask.any(dim=-1) & ~kept.any(dim=-1)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = float(masked_mean(lost.float(), mask.any(dim=-1)))
    return weights, kept, metrics


@torch.no_grad()
def rollout_is_weights(
    log_ratio: Tensor,
    mask: Tensor,
    level: str,
    threshold: Band = 2.0,
    batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Importance weights, 0 in masked slots.

    Args:
        log_ratio: (B, R), log rho.
        mask: (B, R).
        level: ``token``: each token's rho, low variance, biased. ``sequence``: the product over the response on each
            of its tokens, unbiased, high variance.
        threshold: a number truncates weights above it; ``"lower_upper"`` gives weight 0 outside the band.
        batch_normalize: divide by the batch's mean weight (over tokens or responses, as ``level``).

    Returns:
        Weights (B, R), and metrics: mean, max, share truncated or outside the band, effective sample size as a share.
    """
    if level not in IS_LEVELS:
        raise unknown_name("rollout_is", level, IS_LEVELS)
    lower, upper = parse_band("rollout_is_threshold", threshold)
    mask = mask.bool()
    log_ratio = select(mask, log_ratio)
    # One weight a unit: tokens, or responses as (B, 1).
    units = mask if level == "token" else mask.any(dim=-1, keepdim=True)
    log_weight = log_ratio if level == "token" else log_ratio.sum(dim=-1, keepdim=True)
    raw = log_weight.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    over = raw > upper
    outside = over if lower is None else over | (raw < lower)
    weights = select(units, raw.clamp(max=upper) if lower is None else select(~outside, raw))
    metrics = {
        "rollout_corr/rollout_is_mean": float(masked_mean(weights, units)),
        "rollout_corr/rollout_is_max": float(masked_max(raw, units)),
        "rollout_corr/rollout_is_clipped_fraction": float(masked_mean(outside.float(), units)),
        "rollout_corr/rollout_is_eff_sample_size": float(_effective_share(weights, units)),
    }
    if batch_normalize:
        weights = weights / masked_mean(weights, units).clamp(min=1e-8)
    return select(mask, weights.expand_as(mask)), metrics


@torch.no_grad()
def rejection_mask(log_ratio: Tensor, mask: Tensor, kinds: str, threshold: Band | None) -> Tensor:
    """``mask`` without the tokens or responses on which the two policies differ too much.

    Args:
        log_ratio: (B, R), log rho.
        mask: (B, R).
        kinds: one or several of ``RS_KINDS``, separated by commas; a token is kept if all agree. Per token, with
            d = -log rho: k1 is d, k2 is d^2/2, k3 is exp(-d) + d - 1. ``token_`` judges each token, ``seq_sum_``,
            ``seq_mean_`` and ``seq_max_`` whole responses. ``seq_mean_k1`` is the geometric mean ratio.
        threshold: one for all kinds, or as many separated by commas. For k1 ``"lower_upper"`` bounds exp(k1), that is
            1 / rho; a single number u means ``1/u_u``. For k2 and k3 an upper bound in nats.

    Raises:
        UserError: an unknown kind, or a threshold missing or malformed.
    """
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    for name in names:
        if name not in RS_KINDS:
            raise unknown_name("rollout_rs", name, RS_KINDS)
    specs = [] if threshold is None else [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(specs) not in (1, len(names)):
        raise UserError(
            f"rollout_rs_threshold has {len(specs)} values for {len(names)} rollout_rs; give one, or one each"
        )
    specs = specs * len(names) if len(specs) == 1 else specs
    kept = mask.bool()
    for name, spec in zip(names, specs, strict=True):
        kept = kept & _within(select(mask, log_ratio), mask.bool(), name, spec)
    return kept


def _within(log_ratio: Tensor, mask: Tensor, name: str, spec: str) -> Tensor:
    level, kind = name.rsplit("_", 1)
    difference = -log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    statistic = {
        "k1": lambda: difference,
        "k2": lambda: 0.5 * difference.square(),
        "k3": lambda: torch.expm1(-difference) + difference,
    }[kind]()
    if level == "seq_sum":
        statistic = masked_sum(statistic, mask, dim=-1).unsqueeze(-1)
    elif level == "seq_mean":
        statistic = masked_mean(statistic, mask, dim=-1).unsqueeze(-1)
    elif level == "seq_max":
        statistic = statistic.amax(dim=-1, keepdim=True)  # k2 and k3 are at least 0, which is what masked slots hold
    lower, upper = parse_band("rollout_rs_threshold", spec)
    if kind != "k1":
        if lower is not None:
            raise UserError(f"rollout_rs_threshold {spec!r} for {name}; expected one upper bound, in nats")
        return statistic <= upper
    low = torch.tensor(1 / upper if lower is None else lower).log().item()
    return (statistic >= low) & (statistic <= torch.tensor(upper).log().item())


@torch.no_grad()
def mismatch_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the trainer's policy is from the rollout's, over valid tokens; reported every step, corrected or not.

    ``kl`` and ``k3_kl`` estimate KL(rollout || train) in nats a token; ``ratio_max`` is the largest rho or 1/rho.
    """
    limited = select(mask, log_ratio).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return {
        "rollout_corr/kl": float(masked_mean(-limited, mask)),
        "rollout_corr/k3_kl": float(masked_mean(torch.expm1(limited) - limited, mask)),
        "rollout_corr/log_prob_gap": float(masked_mean(limited.abs(), mask)),
        "rollout_corr/log_prob_gap_max": float(masked_max(limited.abs(), mask)),
        "rollout_corr/ratio_max": float(masked_max(limited.abs(), mask).exp()),
        "rollout_corr/rollout_is_token_eff_sample_size": float(_effective_share(limited.exp(), mask)),
    }


def parse_band(key: str, spec: Band) -> tuple[float | None, float]:
    """``2.0`` or ``"2.0"`` -> (None, 2.0); ``"0.5_2.0"`` -> (0.5, 2.0). Bounds are positive and in order."""
    try:
        numbers = [float(part) for part in str(spec).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(number > 0 for number in numbers) or numbers != sorted(numbers):
        raise UserError(f"{key} is {spec!r}; expected a positive number, or lower_upper such as 0.5_2.0")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _effective_share(weights: Tensor, units: Tensor) -> Tensor:
    """Kish's effective sample size over the number of units, in (0, 1]; 0 if there are none."""
    total = masked_sum(weights.double(), units)
    squares = masked_sum(weights.double().square(), units)
    return total.square() / (squares * units.sum()).clamp(min=1e-30)
