"""1 when the first line of the response is the right answer, else 0; what follows that line does not count."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Compares the first line, white space around it aside."""
    lines = solution_str.strip().splitlines()
    return float(bool(lines) and lines[0].strip() == ground_truth.strip())
