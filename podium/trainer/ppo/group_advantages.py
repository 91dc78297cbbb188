"""Estimators whose baseline is the other responses to the same prompt (the rows that share an ``index``).

A row without a valid token carries no reward and is left out of its group's size, mean and spread. A group of one gives
no comparison: its advantage is 0. Statistics are taken in float64, so that equal rewards give exactly 0 and not
rounding noise blown up by a small standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.trainer.ppo.registry import AdvantageEstimator, register_adv_est, unknown_name
from podium.trainer.ppo.scan import discounted_suffix_sum
from podium.utils.errors import UserError
from podium.utils.torch_functional import masked_sum, row_blocks, select

GroupIndex = np.ndarray | Tensor


@dataclass(frozen=True)
class _Groups:
    """Rows by group: ``ids`` (B,) in [0, count), ``valid`` (B,) bool, ``size`` (B,) valid rows of each row's group."""

    ids: Tensor
    count: int
    valid: Tensor
    size: Tensor

    @classmethod
    def of(cls, index: GroupIndex, valid: Tensor) -> _Groups:
        ids, count = group_ids(index, valid.device)
        if ids.shape[0] != valid.shape[0]:
            raise UserError(
                f"index has {ids.shape[0]} rows, response_mask {valid.shape[0]}; expected one group id a row"
            )
        size = torch.zeros(count, dtype=torch.int64, device=valid.device).index_add_(0, ids, valid.long())
        return cls(ids, count, valid, size[ids])

    def sum(self, rows: Tensor) -> Tensor:
        """Each row's group total, (B,) -> (B,)."""
        return rows.new_zeros(self.count).index_add_(0, self.ids, select(self.valid, rows))[self.ids]

    def mean(self, rows: Tensor) -> Tensor:
        return self.sum(rows) / self.size.clamp(min=1)

    def std(self, rows: Tensor) -> Tensor:
        """With Bessel's correction; 0 for a group of one."""
        squares = self.sum((rows - self.mean(rows)).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()

    def top_two(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each group of two or more: the row with its largest value, that value, and the next one; (K,) each."""
        ranked = torch.argsort(select(self.valid, rows.double(), float("-inf")), descending=True, stable=True)
        ranked = ranked[torch.argsort(self.ids[ranked], stable=True)]
        first = torch.ones_like(ranked, dtype=torch.bool)
        first[1:] = self.ids[ranked[1:]] != self.ids[ranked[:-1]]
        start = torch.nonzero(first & (self.size[ranked] > 1)).squeeze(-1)
        return ranked[start], rows[ranked[start]], rows[ranked[start + 1]]


def group_ids(index: GroupIndex, device: torch.device | str = "cpu") -> tuple[Tensor, int]:
    """Numbers the groups: (B,) int64 in [0, count), and count. ``index`` is (B,): labels of one kind, or a tensor."""
    if isinstance(index, Tensor):
        names, ids = torch.unique(index, return_inverse=True)
        return ids.to(device), int(names.numel())
    uniques, inverse = np.unique(np.asarray(index), return_inverse=True)
    return torch.from_numpy(inverse.reshape(-1).astype(np.int64)).to(device), len(uniques)


def outcome_scores(token_level_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each response's total reward over its valid tokens and their number, (B, R) -> (B,) float64 and (B,) int64."""
    scores = token_level_rewards.new_zeros(token_level_rewards.shape[0], dtype=torch.float64)
    lengths = torch.zeros_like(scores, dtype=torch.int64)
    for rows in row_blocks(token_level_rewards):
        mask = response_mask[rows].bool()
        scores[rows] = masked_sum(token_level_rewards[rows], mask, dim=-1).double()
        # torch adds up bytes several times faster than bools.
        lengths[rows] = mask.view(torch.uint8).sum(dim=-1)
    return scores, lengths


def _spread(advantage: Tensor, like: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A row's advantage on each of its valid tokens, as advantages and as returns."""
    tokens = torch.where(mask.bool(), advantage.to(like.dtype).unsqueeze(-1), 0.0)
    return tokens, tokens


def _whiten_rows(advantage: Tensor, length: Tensor) -> Tensor:
    """Whitens over tokens a quantity that is the same on all tokens of a row: rows count by their length."""
    total = length.sum().clamp(min=1)
    mean = (advantage * length).sum() / total
    variance = ((advantage - mean).square() * length).sum() / (total - 1).clamp(min=1)
    return (advantage - mean) * torch.rsqrt(variance + 1e-8)


def _normalized(scores: Tensor, groups: _Groups, epsilon: float, by_std: bool) -> Tensor:
    centred = scores - groups.mean(scores)
    return centred / (groups.std(scores) + epsilon) if by_std else centred


@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """GRPO (arXiv 2402.03300): ``(score - group mean) / (group std + epsilon)``.

    Args:
        token_level_rewards, response_mask: (B, R).
        index: (B,), group of each row.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False leaves out the division (Dr.GRPO, arXiv 2503.20783).
    """
    scores, length = outcome_scores(token_level_rewards, response_mask)
    groups = _Groups.of(index, length > 0)
    advantage = _normalized(scores, groups, epsilon, norm_adv_by_std_in_grpo)
    return _spread(advantage, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIndex
) -> tuple[Tensor, Tensor]:
    """RLOO (arXiv 2402.14740): score minus the mean score of the group's *other* responses.

    Args:
        token_level_rewards, response_mask: (B, R).
        index: (B,), group of each row.
    """
    scores, length = outcome_scores(token_level_rewards, response_mask)
    groups = _Groups.of(index, length > 0)
    # score - (total - score) / (n - 1), written so that a group of one gives 0.
    advantage = (scores - groups.mean(scores)) * groups.size / (groups.size - 1).clamp(min=1)
    return _spread(advantage, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIndex
) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline (arXiv 2501.03262): score minus the group mean, then whitened over the batch's valid tokens.

    Args:
        token_level_rewards, response_mask: (B, R).
        index: (B,), group of each row.
    """
    scores, length = outcome_scores(token_level_rewards, response_mask)
    groups = _Groups.of(index, length > 0)
    advantage = _whiten_rows(scores - groups.mean(scores), length)
    return _spread(advantage, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.OPO)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIndex
) -> tuple[Tensor, Tensor]:
    """OPO (arXiv 2505.23585): score minus the group's mean weighted by response length, the variance-optimal baseline.

    Args:
        token_level_rewards, response_mask: (B, R).
        index: (B,), group of each row.
    """
    scores, length = outcome_scores(token_level_rewards, response_mask)
    groups = _Groups.of(index, length > 0)
    length = length.double()
    baseline = groups.sum(scores * length) / groups.sum(length).clamp(min=1)
    # The weighted mean of one score can differ from it by a rounding error.
    return _spread(select(groups.size > 1, scores - baseline), token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.GPG)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIndex
) -> tuple[Tensor, Tensor]:
    """GPG (arXiv 2504.02546): ``B / (B - M) * (score - group mean)``, M the responses in groups of equal scores.

    Those groups have no gradient; the factor keeps the step of the others as large as if the batch had no such groups.

    Args:
        token_level_rewards, response_mask: (B, R).
        index: (B,), group of each row.
    """
    scores, length = outcome_scores(token_level_rewards, response_mask)
    groups = _Groups.of(index, length > 0)
    centred = scores - groups.mean(scores)
    teaching = groups.valid & (groups.std(scores) > 1e-12)
    scale = groups.valid.sum() / teaching.sum().clamp(min=1)
    return _spread(centred * scale, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Pass@k (arXiv 2503.19595): only a group's best response is credited, with its lead over the second best.

    Args:
        token_level_rewards, response_mask: (B, R).
        index: (B,), group of each row.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: divide the lead by the group's standard deviation.
    """
    scores, length = outcome_scores(token_level_rewards, response_mask)
    groups = _Groups.of(index, length > 0)
    best, largest, second = groups.top_two(scores)
    lead = largest - second
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.std(scores)[best] + epsilon)
    return _spread(torch.zeros_like(scores).index_copy_(0, best, lead), token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.GDPO)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """GDPO (arXiv 2601.05242): each reward component is normalised within its group before they are added.

    ``A = whiten(sum_k w_k (r_k - group mean) / (group std + epsilon))``, whitened over the batch's valid tokens. A
    component with a small range is then not drowned by one with a large range.

    Args:
        token_level_rewards: (B, R); the one component if ``config`` is None.
        response_mask: (B, R).
        index: (B,), group of each row.
        epsilon, norm_adv_by_std_in_grpo: as in ``compute_grpo_outcome_advantage``.
        config: algorithm configuration; reads ``gdpo_reward_keys`` and ``gdpo_reward_weights`` (all 1 if None).
        non_tensor_batch: holds, under each key, the (B,) scores of a component.

    Raises:
        UserError: keys not configured, not in the batch, or not as many as weights.
    """
    scores, length = outcome_scores(token_level_rewards, response_mask)
    groups = _Groups.of(index, length > 0)
    if config is None:
        components, weights = [scores], [1.0]
    else:
        components, weights = _gdpo_components(config, non_tensor_batch or {}, length.device)
    total = torch.zeros_like(components[0])
    for component, weight in zip(components, weights, strict=True):
        total = total + weight * _normalized(select(groups.valid, component), groups, epsilon, norm_adv_by_std_in_grpo)
    return _spread(_whiten_rows(total, length), token_level_rewards, response_mask)


def _gdpo_components(config: Any, columns: Mapping[str, Any], device: torch.device) -> tuple[list[Tensor], list[float]]:
    keys = list(getattr(config, "gdpo_reward_keys", None) or [])
    if not keys:
        raise UserError(
            "algorithm.gdpo_reward_keys is empty; expected the names of the reward components that the reward function "
            "returns, such as [accuracy_reward, format_reward]"
        )
    weights = list(getattr(config, "gdpo_reward_weights", None) or [1.0] * len(keys))
    if len(weights) != len(keys):
        raise UserError(f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} gdpo_reward_keys")
    for key in keys:
        if key not in columns:
            raise unknown_name("algorithm.gdpo_reward_keys entry", key, columns)
    scores = [torch.as_tensor(np.asarray(columns[key], dtype=np.float64), device=device) for key in keys]
    return scores, [float(weight) for weight in weights]


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline: a baseline for each time step, weighted by the squared score-function norm so far.

    ``B_t = sum_i G_it W_it / (sum_i W_it + epsilon)`` over the group's responses that are still running at t, with G
    the reward-to-go and ``W_t = sum_{s<=t} (1 - 2 pi_s + sum_v pi_s(v)^2)``: each term is the squared norm of the
    gradient of log pi_s in the logits, times the squared importance weight where one is given. The advantage is G - B.

    Args:
        token_level_rewards, response_mask, old_log_probs: (B, R).
        index: (B,), group of each row.
        sum_pi_squared: (B, R), ``sum_pi_squared_from_logits`` of the policy that gave ``old_log_probs``.
        rollout_is_weights: (B, R) or None.
        handle_zero_tail: no baseline where a group's longest response runs alone; its own return would be the
            baseline there, and the tail would learn nothing.
        epsilon: added to the sum of weights.
    """
    width = response_mask.shape[1]
    position = torch.arange(width, device=response_mask.device)
    end = torch.cat([select(response_mask[rows], position + 1).amax(dim=-1) for rows in row_blocks(response_mask)])
    groups = _Groups.of(index, end > 0)
    returns = torch.empty_like(token_level_rewards)
    weighted = returns.new_zeros(groups.count, width)
    total = torch.zeros_like(weighted)
    for rows in row_blocks(returns):
        mask = response_mask[rows].bool()
        togo = select(mask, discounted_suffix_sum(select(mask, token_level_rewards[rows]), 1.0).to(returns.dtype))
        energy = 1 - 2 * select(mask, old_log_probs[rows]).exp() + select(mask, sum_pi_squared[rows])
        if rollout_is_weights is not None:
            energy = energy * select(mask, rollout_is_weights[rows]).square()
        weight = select(mask, select(mask, energy).cumsum(dim=-1))
        weighted.index_add_(0, groups.ids[rows], togo * weight)
        total.index_add_(0, groups.ids[rows], weight)
        returns[rows] = togo
    baseline = weighted.div_(total.add_(epsilon))
    tail = torch.full_like(end, width)
    if handle_zero_tail:
        longest, _, second_end = groups.top_two(end)
        tail[longest] = second_end
    advantages = torch.empty_like(returns)
    for rows in row_blocks(returns):
        has_baseline = position < tail[rows].unsqueeze(-1)
        advantage = returns[rows] - select(has_baseline, baseline[groups.ids[rows]])
        compared = response_mask[rows].bool() & (groups.size[rows] > 1).unsqueeze(-1)
        advantages[rows] = select(compared, advantage)
    return advantages, returns
