"""Rewards by name, and the data sources that take them where no file is given.

Each is a reward function like a user's. They are imported when they are needed: some want an optional package.
"""

import importlib

from podium.utils.errors import UserError
from podium.workers.reward.functions import RewardFn

NAMES = {
    "exact_match": "text:exact_match",
    "multiple_choice": "text:multiple_choice",
    "gsm8k": "gsm8k:gsm8k",
    "math": "math:math",
    "code": "code:code",
    "reasoning_gym": "gym:reasoning_gym",
    "boxed_format": "format:boxed_format",
    "think_format": "format:think_format",
    "json_format": "format:json_format",
}
"""Module and function, by name."""

SOURCES = {
    "exact_match": "exact_match",
    "multiple_choice": "multiple_choice",
    "cais/mmlu": "multiple_choice",
    "Idavidrein/gpqa": "multiple_choice",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "math_dapo": "math",
    "math_dapo_reasoning": "math",
    "code": "code",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "reasoning_gym": "reasoning_gym",
}
"""Names by data source; verl's sources where it has them."""

_PREFIXES = {"aime": "math", "numina_": "math", "reasoning_gym/": "reasoning_gym"}


def name_for(data_source: str) -> str:
    """The reward of a data source.

    Raises:
        UserError: there is none.
    """
    found = SOURCES.get(data_source) or next(
        (name for prefix, name in _PREFIXES.items() if data_source.lower().startswith(prefix)), None
    )
    if found is None:
        raise UserError(
            f"no built-in reward for data_source '{data_source}' (there are {', '.join(SOURCES)}); set "
            "custom_reward_function.path to a file with compute_score, or custom_reward_function.name to one of "
            f"{', '.join(NAMES)}"
        )
    return found


def find(name: str) -> RewardFn:
    """The reward of that name.

    Raises:
        UserError: there is none, or it needs a package that is not installed.
    """
    if name not in NAMES:
        raise UserError(
            f"custom_reward_function.name={name}: without custom_reward_function.path, expected one of "
            f"{', '.join(NAMES)}"
        )
    module, function = NAMES[name].split(":")
    found: RewardFn = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return found
