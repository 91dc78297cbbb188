"""Answers that are compared as text."""

import re
from collections.abc import Mapping
from typing import Any

from podium.workers.reward.builtin.answers import final_answer, require_truth

_LETTER = re.compile(r"(?<![A-Za-z\\])\(?([A-J])\)?(?![A-Za-z'])")


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 when the response is the ground truth but for white space around it, else 0."""
    return float(solution_str.strip() == require_truth(ground_truth, data_source).strip())


def multiple_choice(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 when the chosen letter, A to J, is the ground truth's, else 0.

    The choice is in the last boxed answer, after the last ``answer is``, or the response is nothing but a letter. An
    answer that names several letters chooses none.

    Raises:
        ValueError: the ground truth is no letter.
    """
    truth = _letter(require_truth(ground_truth, data_source))
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r} is no letter from A to J")
    answer = final_answer(solution_str)
    return float(_letter(solution_str.strip() if answer is None else answer, whole=answer is None) == truth)


def _letter(answer: str, whole: bool = False) -> str | None:
    """The one letter of an answer such as ``C``, ``(C)``, ``c``, ``C. Paris`` or ``\\text{C}``."""
    answer = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", answer).strip(" .$*")
    if re.fullmatch(r"\(?[A-Ja-j]\)?", answer):
        return answer.strip("()").upper()
    if whole:
        return None
    head = re.match(r"\(?([A-J])(?:\)|[.:]|\)[.:])\s", answer)
    if head:
        return head[1]
    letters = set(_LETTER.findall(answer))
    return letters.pop() if len(letters) == 1 else None
