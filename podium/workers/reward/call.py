"""Calling a reward function: whatever comes of it is an outcome, never an exception."""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from podium.utils.errors import UserError
from podium.workers.reward.functions import RewardFn
from podium.workers.reward.outcome import Outcome, ScoreRequest, outcome_of_error, outcome_of_result

# A reward function may call sys.exit, in a library that it uses for one.
Failure = (Exception, SystemExit)

_FIRST_PAUSE_S = 0.5


def call_row(fn: RewardFn, request: ScoreRequest) -> Outcome:
    """Scores one response with a plain function; an awaitable that it returns is run to its end."""
    try:
        result = _start(fn, request)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
    except Failure as error:
        return outcome_of_error(error, __file__)
    return outcome_of_result(result)


async def call_async(fn: RewardFn, request: ScoreRequest, limit_s: float, retries: int) -> Outcome:
    """Scores one response with an async function.

    A function that has an async method ``admit`` says with it when an attempt may begin (a rate limit).

    Args:
        limit_s: seconds for all attempts together, once the first may begin.
        retries: further attempts after one that raised, at pauses that double from half a second, each stretched at
            random by up to a half, so that those who failed together do not come back together.
    """
    failed: list[Outcome] = []

    admit = getattr(fn, "admit", None)

    async def attempts() -> Outcome:
        for attempt in range(retries + 1):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(1.0, 1.5))
            if attempt and admit is not None:
                await admit()
            try:
                return outcome_of_result(await _start(fn, request))
            except Failure as error:
                failed.append(outcome_of_error(error, __file__))
                if isinstance(error, UserError):  # the input is wrong, and will be next time
                    break
        return failed[-1]

    if admit is not None:
        await admit()
    try:
        return await asyncio.wait_for(attempts(), limit_s)
    except TimeoutError:
        last = f"; attempt {len(failed)} failed with {failed[-1].reason}" if failed else ""
        return Outcome("timeout", reason=f"no result in {limit_s:g} s{last}")


def call_batch(fn: Callable[..., Any], requests: list[ScoreRequest]) -> list[Outcome] | Outcome:
    """Scores responses with one call of a function that takes lists; one outcome where the call itself fails.

    What is no list of as many results is an error of every response: it is the function's doing, and not that of some
    response that could be told from the others by calling again.
    """
    try:
        results = fn(
            data_sources=[request.data_source for request in requests],
            solution_strs=[request.solution_str for request in requests],
            ground_truths=[request.ground_truth for request in requests],
            extra_infos=[request.extra_info for request in requests],
        )
        if inspect.isawaitable(results):
            results = asyncio.run(_awaited(results))
        if isinstance(results, str | Mapping) or not isinstance(results, Iterable):
            wrong = f"it returned {type(results).__name__} instead of a list of results"
            return [Outcome("error", reason=wrong)] * len(requests)
        results = list(results)
    except Failure as error:
        return outcome_of_error(error, __file__)
    if len(results) != len(requests):
        wrong = f"it returned {len(results)} results for {len(requests)} responses"
        return [Outcome("error", reason=wrong)] * len(requests)
    return [outcome_of_result(result) for result in results]


def _start(fn: RewardFn, request: ScoreRequest) -> Any:
    return fn(
        data_source=request.data_source,
        solution_str=request.solution_str,
        ground_truth=request.ground_truth,
        extra_info=request.extra_info,
    )


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def is_async(fn: RewardFn) -> bool:
    """Whether calling `fn` gives a coroutine, and calls may overlap."""
    inner = fn.func if isinstance(fn, partial) else fn
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
