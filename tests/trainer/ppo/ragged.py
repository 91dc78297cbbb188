"""A small batch with everything that goes wrong in practice, and the way the trainer calls an estimator."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.trainer.ppo.advantages import get_adv_estimator_fn

# Rows by length: whole, with gaps, of one token, of none; groups of 4, 3, 2 (one of them empty) and 1.
LENGTHS = [9, 1, 0, 5, 7, 2, 9, 4, 6, 3]
GROUPS = ["b", "a", "a", "b", "c", "b", "c", "b", "c", "alone"]
ROWS, WIDTH = len(LENGTHS), 9
POISON = (math.nan, math.inf, -math.inf)


def response_mask() -> Tensor:
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(-1)
    mask[0, 3:5] = False  # tool output inside a response
    mask[6, 0] = False
    return mask


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Inputs of every estimator, by argument name."""
    random = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=random, dtype=dtype)

    mask = response_mask()
    old_log_probs = -normal().abs()
    return {
        "token_level_rewards": torch.where(mask, normal(), 0.0),
        "values": torch.where(mask, normal(), 0.0),
        "response_mask": mask,
        "index": np.array(GROUPS, dtype=object),
        "gamma": 0.9,
        "lam": 0.8,
        "epsilon": 1e-6,
        "norm_adv_by_std_in_grpo": True,
        "reward_baselines": torch.randn(ROWS, generator=random, dtype=dtype),
        "old_log_probs": old_log_probs,
        "sum_pi_squared": torch.rand(ROWS, WIDTH, generator=random, dtype=dtype),
        "config": SimpleNamespace(gdpo_reward_keys=["accuracy", "format"], gdpo_reward_weights=[1.0, 0.5]),
        "non_tensor_batch": {
            "accuracy": np.array([1, 0, 1, 0, 1, 1, 0, 0, 1, 1], dtype=object),
            "format": np.array([0.1, 0.2, 9.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0], dtype=object),
        },
    }


def estimate(name: str, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Calls an estimator with the arguments that it names."""
    function = get_adv_estimator_fn(name)
    return function(**{key: inputs[key] for key in inspect.signature(function).parameters if key in inputs})


def poisoned(matrix: Tensor, mask: Tensor, seed: int = 0) -> Tensor:
    """``matrix`` with NaN and infinities in every masked slot."""
    random = torch.Generator().manual_seed(seed)
    kinds = torch.tensor(POISON, dtype=matrix.dtype)[torch.randint(3, matrix.shape, generator=random)]
    return torch.where(mask, matrix, kinds)


def take_rows(inputs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """The batch made of these rows, in this order."""

    def take(value: Any) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            return value[rows]
        return {key: take(column) for key, column in value.items()} if isinstance(value, dict) else value

    return {key: take(value) for key, value in inputs.items()}
