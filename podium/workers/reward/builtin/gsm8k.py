"""Grade-school arithmetic: the last number counts."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from podium.utils.errors import UserError
from podium.workers.reward.builtin.answers import last_boxed, require_truth

_NUMBER = re.compile(r"-?\$?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_METHODS = ("flexible", "strict")


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "flexible",
) -> float:
    """1 when the final number equals the ground truth's, else 0.

    Args:
        method: ``strict`` takes the first number after the last ``####`` and nothing else; ``flexible`` takes the last
            boxed number where there is no ``####``, and the last number of all where there is neither.

    Raises:
        UserError: unknown method.
        ValueError: the ground truth has no number.
    """
    if method not in _METHODS:
        raise UserError(f"custom_reward_function.reward_kwargs.method={method}: expected {' or '.join(_METHODS)}")
    truth = _number(require_truth(ground_truth, data_source).rpartition("####")[2], last=True)
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r} has no number")
    return float(_answer(solution_str, method == "strict") == truth)


def _answer(text: str, strict: bool) -> Decimal | None:
    _, marked, tail = text.rpartition("####")
    if marked or strict:
        return _number(tail, last=False) if marked else None
    boxed = last_boxed(text)
    return _number(text if boxed is None else boxed, last=True)


def _number(text: str, last: bool) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    try:
        return Decimal(re.sub(r"[$,\s]", "", numbers[-1 if last else 0]))
    except InvalidOperation:
        return None
