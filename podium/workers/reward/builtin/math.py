"""Mathematical answers, compared by what they mean, through the package math-verify."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from podium.utils.errors import UserError
from podium.workers.reward.builtin.answers import final_answer, require_truth

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[a-z][a-z' -]+")

try:
    from math_verify import parse, verify
except ImportError as error:
    raise UserError("the reward for mathematics needs math-verify: pip install podium[math]") from error

# It warns that its own limits of time are off. They would make a late comparison a wrong answer; the pool's make it a
# response without a score.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 when the final answer equals the ground truth, else 0; with ``answered``, whether there was one.

    The final answer is in the last closed ``\boxed{...}``, or follows the last ``answer is``: numbers elsewhere do not
    count. Words are compared as words (``\text{even}`` is no product of letters), everything else as mathematics.

    Raises:
        ValueError: the ground truth is neither.
    """
    answer = final_answer(solution_str)
    truth = require_truth(ground_truth, data_source)
    boxed_truth = final_answer(truth)
    truth = truth if boxed_truth is None else boxed_truth
    return {"score": float(answer is not None and _equal(truth, answer)), "answered": bool(answer)}


def _equal(truth: str, answer: str) -> bool:
    if _words(truth) is not None or _words(answer) is not None:
        return _words(truth) == _words(answer)
    expected, given = _parse(truth), _parse(answer)
    if not expected:
        raise ValueError(f"ground truth {truth!r} is no mathematics")
    return verify(expected, given, timeout_seconds=None)


def _words(answer: str) -> str | None:
    """A text of two letters or more, in lower case."""
    plain = " ".join(_WRAPPED.sub(r"\1", answer).strip(" .$*").lower().split())
    return plain if _WORDS.fullmatch(plain) else None


def _parse(answer: str) -> list[Any]:
    answer = re.sub(r"\\?%", "", answer).strip().strip("$").strip()
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
