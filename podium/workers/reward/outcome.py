"""What scoring one sample comes to."""

import math
import numbers
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from podium.utils.errors import UserError


@dataclass(frozen=True)
class ScoreRequest:
    """One response to be scored."""

    data_source: str
    solution_str: str
    """The decoded response, without special tokens."""
    ground_truth: Any
    extra_info: Mapping[str, Any]
    """The row's ``extra_info``, and ``response_finished``: False when the response was cut at the length limit."""
    prompt: Any = None
    """As in the data, a string or a chat list: for models that score, and for who reads about a failure."""


@dataclass(frozen=True)
class Outcome:
    """The typed result. Only ``score`` has a number; the others are failures or refusals, and never a score of 0."""

    kind: Literal["score", "timeout", "error", "abstain"]
    score: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the result."""
    reason: str = ""
    """Why there is no score, in one line."""
    traceback: str = ""
    """All of an error's traceback; of a process that died or was killed, the last that it printed; of a judge, all that
    it answered."""


class Scorer(Protocol):
    """Scores requests, each by itself: a failure is that request's `Outcome`, never an exception."""

    takes_parts: bool
    """Whether a batch may come in several calls."""

    def __call__(self, requests: list[ScoreRequest]) -> list[Outcome]:
        """One outcome a request, in their order."""
        ...

    def describe(self) -> str:
        """What scores, for errors."""
        ...

    def cancel(self) -> None:
        """Has a call that another thread waits for end soon, with an exception."""
        ...

    def close(self) -> None:
        """Ends what it keeps running. It can be used again."""
        ...


def outcome_of_result(result: Any) -> Outcome:
    """What a reward function's return value means.

    A finite number, or a dict with one under ``score``; a dict with ``abstain`` says why there is none.
    """
    extra: dict[str, Any] = {}
    score = result
    if isinstance(result, Mapping):
        if result.get("abstain") is not None:
            return Outcome("abstain", reason=" ".join(str(result["abstain"]).split()))
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "no keys"
            return Outcome("error", reason=f"it returned a dict without 'score' ({keys})")
        extra = {str(name): value for name, value in result.items()}
        score = extra.pop("score")
    number = _number(score)
    if number is None:
        what = "None" if score is None else f"{type(score).__name__} ({str(score)[:40]!r})"
        return Outcome("error", reason=f"it returned {what}; expected a number or a dict with 'score'")
    if not math.isfinite(number):
        return Outcome("error", reason=f"it returned {number}; expected a finite number")
    return Outcome("score", score=number, extra=extra)


def _number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()  # a 0-dim tensor or array
    return float(value) if isinstance(value, numbers.Real) else None


def outcome_of_error(error: BaseException, own_file: str) -> Outcome:
    """An exception that a reward function raised, with the last two places it came from; `own_file` made the call."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return Outcome("error", reason=message)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != own_file]
    places = [f"{Path(frame.filename).name} line {frame.lineno}: {frame.line}" for frame in frames[-2:]]
    return Outcome(
        "error",
        reason="; at ".join([f"{type(error).__name__}: {message}", *places]),
        traceback="".join(traceback.format_exception(error)),
    )
