"""An advantage estimator, a policy loss and a reward of one's own, registered from outside the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.trainer.ppo.advantages import register_adv_est
from podium.trainer.ppo.losses import Denominator, agg_loss, register_policy_loss
from podium.utils.torch_functional import masked_max, masked_sum, select


@register_adv_est("group_median")
@torch.no_grad()
def group_median(token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Score minus the median score of the responses to the same prompt: what is usual there teaches nothing.

    It is called with the keyword arguments that it names: rewards and mask (B, R), and the prompt of each row (B,).
    """
    scores = masked_sum(token_level_rewards, response_mask, dim=-1)
    prompts, row_prompt = np.unique(index, return_inverse=True)
    medians = torch.stack([scores[torch.as_tensor(row_prompt == p)].median() for p in range(len(prompts))])
    advantages = (scores - medians[torch.as_tensor(row_prompt)]).unsqueeze(-1).expand_as(token_level_rewards)
    advantages = select(response_mask, advantages)
    return advantages, advantages


@register_policy_loss("spo")
def spo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SPO (arXiv 2401.16025): ``-(A r - |A| (r - 1)^2 / (2 eps))``, a pull back to r = 1 + eps where PPO lets go.

    All tensors are (B, R); eps is ``actor.clip_ratio``. Loss and metrics are the micro-batch's share of the mini-batch,
    which is what the denominator makes of them; metrics named ``_max`` are maximised.
    """
    ratio = select(response_mask, log_prob - old_log_prob).clamp(-20, 20).exp()
    advantages = select(response_mask, advantages)
    losses = -advantages * ratio + advantages.abs() * (ratio - 1).square() / (2 * config.clip_ratio)
    if rollout_is_weights is not None:
        losses = losses * select(response_mask, rollout_is_weights)
    deviation = masked_max((ratio - 1).abs().detach(), response_mask)
    return agg_loss(losses, response_mask, loss_agg_mode, denominator), {"actor/ratio_dev_max": deviation}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 for the right answer, and up to 0.2 for characters in their place; each further key becomes a metric."""
    right = float(solution_str == ground_truth)
    in_place = sum(a == b for a, b in zip(solution_str, ground_truth, strict=False)) / len(ground_truth)
    return {"score": right + 0.2 * in_place, "accuracy": right, "in_place": in_place}
