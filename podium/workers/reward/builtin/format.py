"""Rewards for the form of a response, whatever it says; parts of a sum (``custom_reward_function.sources``)."""

import json
import re
from collections.abc import Mapping
from typing import Any

from podium.workers.reward.builtin.answers import last_boxed

_THINK = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


def boxed_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    r"""1 for exactly one ``\boxed{...}``, closed and with something in it, else 0."""
    return float(solution_str.count("\\boxed{") == 1 and bool(last_boxed(solution_str)))


def think_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 for ``<think>...</think> <answer>...</answer>`` and nothing else, each tag once and neither empty, else 0.

    A prompt that ends with ``<think>`` has opened it already: then the response begins inside.
    """
    text = solution_str if solution_str.lstrip().startswith("<think>") else f"<think>{solution_str}"
    found = _THINK.fullmatch(text)
    once = all(text.count(tag) == 1 for tag in _TAGS)
    return float(found is not None and once and bool(found["think"].strip()) and bool(found["answer"].strip()))


def json_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 for a JSON object, in a code fence or not, with nothing around it, else 0."""
    fenced = _FENCED.fullmatch(solution_str)
    try:
        return float(isinstance(json.loads(fenced[1] if fenced else solution_str), dict))
    except ValueError:
        return 0.0
