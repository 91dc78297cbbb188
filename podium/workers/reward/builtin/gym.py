"""Tasks of the package reasoning-gym, scored by their own verifiers."""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from podium.utils.errors import UserError

try:
    import reasoning_gym as package
except ImportError as error:
    raise UserError("the reward for reasoning_gym needs its package: pip install podium[reasoning-gym]") from error

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """The verifier's score, 0 to 1, of what stands in the last ``<answer>`` tags, or of the whole response without.

    The task is that of ``data_source=reasoning_gym/TASK``, or ``extra_info["source_dataset"]``. ``extra_info`` has
    ``metadata`` and ``question``, as the package makes them; metadata may be JSON text, which a table can hold.

    Raises:
        UserError: no task, or an unknown one.
    """
    info = dict(extra_info or {})
    metadata = info.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    task = data_source.partition("/")[2] or info.get("source_dataset") or metadata.get("source_dataset")
    if not task:
        raise UserError(f"data_source '{data_source}' names no task: expected reasoning_gym/TASK")
    found = _ANSWER.findall(solution_str)
    answer = found[-1].strip() if found else solution_str.strip()
    entry = {"question": info.get("question"), "answer": ground_truth, "metadata": metadata}
    return float(_verifier(task)(answer, entry))


@functools.cache
def _verifier(task: str) -> Callable[..., float]:
    try:
        verifier: Callable[..., float] = package.get_score_answer_fn(task)
    except ValueError as error:
        raise UserError(f"reasoning_gym has no task '{task}' ({error})") from None
    return verifier
