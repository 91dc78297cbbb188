"""Advantage estimators by name: ``get_adv_estimator_fn(config.algorithm.adv_estimator)``.

Every estimator returns ``(advantages, returns)``, both (B, R) in the rewards' dtype, without gradient, and 0 in masked
slots. The trainer calls it with the keyword arguments that it names. Here are those that look at each token;
``group_advantages`` has those that compare the responses to one prompt.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from podium.trainer.ppo.group_advantages import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from podium.trainer.ppo.registry import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    get_adv_estimator_fn,
    register_adv_est,
)
from podium.trainer.ppo.scan import discounted_suffix_sum
from podium.utils.torch_functional import masked_whiten, row_blocks, select

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "AdvantageEstimator",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "get_adv_estimator_fn",
    "register_adv_est",
]


@register_adv_est(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438), whitened over the batch's valid tokens.

    With t' the next valid token after t: ``delta_t = r_t + gamma V_t' - V_t`` and ``A_t = delta_t + gamma lam A_t'``; V
    and A after the last one are 0. Masked tokens inside a response (tool output) are stepped over, at no discount.

    Args:
        token_level_rewards, values, response_mask: (B, R).
        gamma: discount a token.
        lam: decay of the TD errors a token; 1 is Monte Carlo, 0 is one step.

    Returns:
        Whitened advantages; returns = advantages before whitening + values.
    """
    advantages, returns = torch.empty_like(token_level_rewards), torch.empty_like(token_level_rewards)
    for rows in row_blocks(token_level_rewards):
        mask = response_mask[rows].bool()
        slots = _slots(mask)
        reward = _pack(select(mask, token_level_rewards[rows]).double(), slots)
        value = _pack(select(mask, values[rows]).double(), slots)
        delta = reward - value
        delta[:, :-1] += gamma * value[:, 1:]
        advantage = discounted_suffix_sum(delta, gamma * lam)
        advantages[rows] = _unpack(advantage, slots).to(advantages.dtype)
        returns[rows] = _unpack(advantage + value, slots).to(returns.dtype)
    return masked_whiten(advantages, response_mask), returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): discounted reward-to-go, whitened over the batch's valid tokens.

    Args:
        token_level_rewards, response_mask: (B, R).
        gamma: discount a valid token.
    """
    returns = torch.empty_like(token_level_rewards)
    for rows in row_blocks(token_level_rewards):
        mask = response_mask[rows].bool()
        slots = _slots(mask)
        reward = _pack(select(mask, token_level_rewards[rows]).double(), slots)
        returns[rows] = _unpack(discounted_suffix_sum(reward, gamma), slots).to(returns.dtype)
    return masked_whiten(returns, response_mask), returns


@register_adv_est(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): reward-to-go minus the reward of the greedy response to the same prompt.

    Args:
        token_level_rewards, response_mask: (B, R).
        reward_baselines: (B,), each row's greedy reward.
    """
    advantages, returns = torch.empty_like(token_level_rewards), torch.empty_like(token_level_rewards)
    baselines = reward_baselines.to(returns.dtype).unsqueeze(-1)
    for rows in row_blocks(token_level_rewards):
        mask = response_mask[rows].bool()
        togo = discounted_suffix_sum(select(mask, token_level_rewards[rows]), 1.0).to(returns.dtype)
        returns[rows] = select(mask, togo)
        advantages[rows] = select(mask, togo - baselines[rows])
    return advantages, returns


def _slots(mask: Tensor) -> Tensor | None:
    """Where each valid token goes when a row's gaps are closed, (B, R), masked ones to R; None if there are no gaps."""
    if not bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        return None
    return torch.where(mask, mask.cumsum(dim=-1) - 1, mask.shape[-1])


def _pack(matrix: Tensor, slots: Tensor | None) -> Tensor:
    """Moves a row's valid tokens to its front, zeros behind."""
    if slots is None:
        return matrix
    spare_column = matrix.new_zeros(matrix.shape[0], matrix.shape[1] + 1)
    return spare_column.scatter_(1, slots, matrix)[:, :-1].contiguous()


def _unpack(matrix: Tensor, slots: Tensor | None) -> Tensor:
    """Moves them back, zeros in the gaps."""
    return matrix if slots is None else F.pad(matrix, (0, 1)).gather(1, slots)
