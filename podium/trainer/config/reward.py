"""Where scores come from."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OverlongBufferConfig:
    """DAPO's soft penalty for length. Training only; validation reports the reward function's score."""

    enable: bool = False
    """Take a penalty from the score of responses that come near data.max_response_length."""
    len: int = 0
    """Tokens before the maximum over which the penalty grows from 0. Required when enabled."""
    penalty_factor: float = 1.0
    """Penalty at the maximum, in units of score."""


@dataclass
class RewardModelConfig:
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass
class RewardFunctionConfig:
    path: str | None = None
    """Python file with the reward function; null scores by data_source."""
    name: str = "compute_score"
    """Function in that file: (data_source, solution_str, ground_truth, extra_info) -> number or dict with score."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for it."""
