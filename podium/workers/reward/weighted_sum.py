"""Several reward functions as one: their weighted sum, with each part beside it."""

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podium.utils.errors import UserError
from podium.workers.reward.functions import RewardFn, RewardSource
from podium.workers.reward.outcome import outcome_of_result

_KEYS = ("path", "name", "weight", "reward_kwargs")


@dataclass(frozen=True)
class Part:
    """One of the functions."""

    label: str
    """Its score becomes the key of this name."""
    weight: float
    source: RewardSource


@dataclass(frozen=True)
class SummedSource:
    """``sum_k weight_k score_k``. A part without a score leaves the whole without one: no part is ever taken for 0."""

    parts: tuple[Part, ...]

    def load(self) -> RewardFn:
        """Imports all parts.

        Raises:
            UserError: as `RewardSource.load`.
        """
        from podium.workers.reward.call import is_async

        functions = [part.source.load() for part in self.parts]
        kind = _AsyncSum if any(map(is_async, functions)) else _Sum
        return kind(self.parts, functions)

    def __str__(self) -> str:
        return " + ".join(f"{part.weight:g} {part.label} ({part.source})" for part in self.parts)


class _Sum:
    def __init__(self, parts: tuple[Part, ...], functions: list[RewardFn]):
        self._parts, self._functions = parts, functions

    def __call__(self, **call: Any) -> dict[str, Any]:
        return self._add([function(**call) for function in self._functions])

    def _add(self, results: list[Any]) -> dict[str, Any]:
        total, extra = 0.0, {}
        for part, result in zip(self._parts, results, strict=True):
            outcome = outcome_of_result(result)
            if outcome.kind == "abstain":
                return {"abstain": f"{part.label}: {outcome.reason}"}
            if outcome.score is None:
                raise ValueError(f"{part.label}: {outcome.reason}")
            total += part.weight * outcome.score
            extra[part.label] = outcome.score
            extra.update((f"{part.label}/{key}", value) for key, value in outcome.extra.items())
        return {"score": total, **extra}


class _AsyncSum(_Sum):
    async def __call__(self, **call: Any) -> dict[str, Any]:  # type: ignore[override]
        started = [function(**call) for function in self._functions]
        waiting = [result for result in started if inspect.isawaitable(result)]
        finished = iter(await asyncio.gather(*waiting))
        return self._add([next(finished) if inspect.isawaitable(result) else result for result in started])


def summed_source(sources: Mapping[str, Any]) -> SummedSource:
    """From ``custom_reward_function.sources``.

    Raises:
        UserError: a part that is no mapping, has an unknown key, or a weight that is no number.
    """
    parts = []
    for label, settings in sources.items():
        key = f"custom_reward_function.sources.{label}"
        if not isinstance(settings, Mapping):
            raise UserError(f"{key}={settings}: expected {{{', '.join(_KEYS)}}}")
        unknown = [name for name in settings if name not in _KEYS]
        if unknown:
            raise UserError(f"{key}.{unknown[0]}: there is no such key; there are {', '.join(_KEYS)}")
        weight = settings.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"{key}.weight={weight}: expected a number")
        name, kwargs = settings.get("name", "compute_score"), settings.get("reward_kwargs") or {}
        parts.append(Part(label, float(weight), RewardSource(settings.get("path"), name, dict(kwargs))))
    return SummedSource(tuple(parts))
