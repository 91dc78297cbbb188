"""A reward that needs the whole batch: right answers count more when few others have given the same text.

custom_reward_function.path=examples/reward_functions/batch_novelty.py reward_model.reward_manager=batch
"""

from __future__ import annotations

from collections import Counter
from typing import Any


def compute_score(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: list[dict[str, Any]]
) -> list[dict[str, float]]:
    """1 for a right answer, and up to 0.2 more for one of its own; 0 for a wrong one."""
    counts = Counter(solution_strs)
    scores = []
    for text, truth in zip(solution_strs, ground_truths, strict=True):
        right, novelty = float(str(truth) in text), 1.0 / counts[text]
        scores.append({"score": right * (1.0 + 0.2 * novelty), "right": right, "novelty": novelty})
    return scores
