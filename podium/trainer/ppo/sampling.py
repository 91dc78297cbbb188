"""Which responses are trained on: DAPO's dynamic sampling and PF-PPO's reweighting."""

from __future__ import annotations

import torch
from torch import Tensor

from podium.trainer.ppo.group_advantages import GroupIndex, group_ids
from podium.trainer.ppo.registry import unknown_name
from podium.utils.errors import UserError

PF_PPO_METHODS = ("pow", "max_min", "max_random")


@torch.no_grad()
def rows_with_signal(scores: Tensor, index: GroupIndex, valid: Tensor | None = None) -> Tensor:
    """Rows of groups whose scores are not all equal; the others have advantage 0 (DAPO, arXiv 2503.14476).

    Args:
        scores: (B,), what the groups are judged by: reward, accuracy, ...
        index: (B,), group of each row.
        valid: (B,) bool, False where a row was not scored; such rows are not compared, and stay with their group.

    Returns:
        (B,) bool.
    """
    ids, count = group_ids(index, scores.device)
    counted = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid.bool()
    scores = scores.double()
    lowest = torch.full((count,), float("inf"), dtype=torch.float64, device=scores.device)
    lowest.scatter_reduce_(0, ids, torch.where(counted, scores, float("inf")), "amin")
    highest = torch.full_like(lowest, float("-inf"))
    highest.scatter_reduce_(0, ids, torch.where(counted, scores, float("-inf")), "amax")
    return (highest > lowest)[ids]


@torch.no_grad()
def take_groups(index: GroupIndex, keep: Tensor, num_groups: int) -> Tensor:
    """Rows of the first ``num_groups`` groups that are kept, in their order of appearance.

    Args:
        index: (B,), group of each row.
        keep: (B,) bool, equal within a group.
        num_groups: at most so many.

    Returns:
        Row numbers, int64, ascending.
    """
    ids, count = group_ids(index, keep.device)
    rows = torch.arange(ids.numel(), device=keep.device)
    first = torch.full((count,), ids.numel(), device=keep.device)
    first.scatter_reduce_(0, ids, torch.where(keep, rows, ids.numel()), "amin")
    order = torch.empty_like(first)
    order[first.argsort()] = torch.arange(count, device=keep.device)
    return rows[keep & (order[ids] < num_groups)]


def needs_refill(groups_kept: int, groups_wanted: int, num_gen_batches: int, max_num_gen_batches: int) -> bool:
    """Whether to generate another batch of prompts before training.

    Args:
        groups_kept: groups with signal so far.
        groups_wanted: prompts in a training batch.
        num_gen_batches: batches generated so far.
        max_num_gen_batches: most to generate for one training batch; 0 or less is no limit.

    Raises:
        UserError: too few groups, and no batch left to try.
    """
    if groups_kept >= groups_wanted:
        return False
    if 0 < max_num_gen_batches <= num_gen_batches:
        raise UserError(
            f"only {groups_kept} of {groups_wanted} prompts got differing rewards in {num_gen_batches} batches; "
            "the data may be too easy or too hard: change it, or raise algorithm.filter_groups.max_num_gen_batches"
        )
    return True


@torch.no_grad()
def pf_ppo_resample(
    scores: Tensor,
    method: str = "pow",
    weight_pow: float = 2.0,
    generator: torch.Generator | None = None,
    draws: int | None = None,
) -> Tensor:
    """PF-PPO (arXiv 2409.06957): draws rows with replacement, those whose scores are more reliable more often.

    Args:
        scores: (B,).
        method: weight of a row: ``pow`` |score| ** weight_pow; ``max_min`` 1 at the largest and smallest score, else 0;
            ``max_random`` 0.4 at the largest, else 0.1.
        weight_pow: exponent of ``pow``.
        generator: source of the draws; torch's own if None.
        draws: how many; B if None.

    Returns:
        Row numbers (draws,), int64.
    """
    if method == "pow":
        weights = scores.double().abs().pow(weight_pow)
    elif method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif method == "max_random":
        weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    else:
        raise unknown_name("algorithm.pf_ppo.reweight_method", method, PF_PPO_METHODS)
    # All scores 0 would leave nothing to draw from.
    draws = scores.numel() if draws is None else draws
    return torch.multinomial(weights.clamp(min=1e-8), draws, replacement=True, generator=generator)
