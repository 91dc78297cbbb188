"""AdamW and its learning-rate schedule, from the configuration."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from podium.utils.errors import UserError


def build_optimizer(named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: Any) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices only (vectors are norms and biases).

    Args:
        config: has ``lr``, ``betas``, ``eps``, ``weight_decay``.
    """
    trainable = [p for _, p in named_parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: Any, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of `lr_factor` on an optimizer whose groups have the peak learning rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(config, total_steps))


def lr_factor(config: Any, total_steps: int) -> Callable[[int], float]:
    """Learning rate of step 0, 1, ... as a share of the peak.

    Linear warm-up to the peak, then constant, or cosine or linear decay to ``min_lr_ratio`` at `total_steps`.

    Raises:
        UserError: an unknown ``lr_scheduler_type``.
    """
    kind, floor = config.lr_scheduler_type, config.min_lr_ratio
    if kind not in ("constant", "cosine", "linear"):
        raise UserError(f"optim.lr_scheduler_type={kind}: expected constant, cosine or linear")
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if kind == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0 - progress
        return floor + (1.0 - floor) * shape

    return factor


def set_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Puts the schedule after `step` optimizer steps, as if they had been made."""
    scheduler.last_epoch, scheduler._step_count = step, step + 1
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
