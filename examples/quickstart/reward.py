"""The quickstart's reward: 1 for the right answer, 0 for anything else."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the decoded response is exactly `ground_truth`, else 0.0."""
    return 1.0 if solution_str == ground_truth else 0.0
