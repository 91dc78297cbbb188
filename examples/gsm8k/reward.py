"""GSM8K's reward: 1 when the last number of the answer is right, else 0."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> float | None:
    """The number after ``####`` where there is one, else the last number; None without any."""
    numbers = _NUMBER.findall(text.rpartition("####")[2]) or _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 or 0.0; `ground_truth` is the number as text."""
    answer = final_number(solution_str)
    return float(answer is not None and answer == final_number(str(ground_truth)))
