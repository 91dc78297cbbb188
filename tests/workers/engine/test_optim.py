"""Learning rates by hand, and which parameters decay."""

import dataclasses
import math

import pytest
import torch

from podium.trainer.config.shared import OptimConfig
from podium.utils.errors import UserError
from podium.workers.engine.optim import build_optimizer, build_scheduler


def rates(total_steps: int, steps: int, **config) -> list[float]:
    module = torch.nn.Linear(2, 2)
    settings = OptimConfig(lr=1.0, **config)
    optimizer = build_optimizer(module.named_parameters(), settings)
    scheduler = build_scheduler(optimizer, settings, total_steps)
    seen = []
    for _ in range(steps):
        seen.append(scheduler.get_last_lr()[0])
        assert all(group["lr"] == seen[-1] for group in optimizer.param_groups)
        optimizer.step()
        scheduler.step()
    return seen


def test_constant_after_warm_up():
    assert rates(10, 6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(10, 3) == [1.0, 1.0, 1.0]
    assert rates(10, 4, lr_warmup_steps_ratio=0.25) == [0.5, 1.0, 1.0, 1.0]
    assert rates(10, 2, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5) == [1.0, 1.0], "steps, even 0, beat the ratio"


def test_linear_and_cosine_end_at_the_floor():
    linear = rates(6, 8, lr_warmup_steps=2, lr_scheduler_type="linear", min_lr_ratio=0.2)
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = rates(6, 8, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.2)
    half = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert cosine == pytest.approx([0.5, 1.0, 1.0, half, 0.6, 1.2 - half, 0.2, 0.2])


@pytest.mark.parametrize("total_steps", [0, 1, 3])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_short_runs_have_a_schedule(kind: str, total_steps: int):
    for rate in rates(total_steps, total_steps + 2, lr_scheduler_type=kind, lr_warmup_steps=5):
        assert 0.0 < rate <= 1.0


def test_unknown_schedule_is_refused():
    with pytest.raises(UserError, match="lr_scheduler_type=cosin: expected constant, cosine or linear"):
        rates(1, 1, lr_scheduler_type="cosin")


def test_only_matrices_decay():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    module[0].weight.requires_grad_(False)
    module.append(torch.nn.Linear(3, 2))
    optimizer = build_optimizer(module.named_parameters(), OptimConfig(lr=0.5, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in module.named_parameters():
        factor = 0.75 if name == "2.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)
    assert dataclasses.asdict(OptimConfig())["betas"] == list(optimizer.defaults["betas"])
