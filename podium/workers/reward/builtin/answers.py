"""Finding the final answer in a response. The last one counts: a model may correct itself."""

import re

from podium.utils.errors import UserError

_ANSWER_IS = re.compile(r"answer\**\s*(?:is\s*:?|:|=)", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""What is inside the last ``\boxed{...}`` or ``\fbox{...}``, braces balanced; None if that is not closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip()
    return None


def after_answer_is(text: str) -> str | None:
    """The rest of the line after the last ``answer:`` or ``answer is``."""
    found = list(_ANSWER_IS.finditer(text))
    if not found:
        return None
    line = text[found[-1].end() :].lstrip(" *").partition("\n")[0]
    return line.replace("**", "").strip().removesuffix(".").strip()


def final_answer(text: str) -> str | None:
    """The last boxed answer, else what follows the last ``answer is``."""
    boxed = last_boxed(text)
    return boxed if boxed is not None else after_answer_is(text)


def require_truth(ground_truth: object, data_source: str) -> str:
    """The ground truth as text.

    Raises:
        UserError: the row has none.
    """
    if ground_truth is None:
        raise UserError(f"a row of data_source '{data_source}' has no reward_model.ground_truth to compare with")
    return str(ground_truth)
