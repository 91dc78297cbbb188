import asyncio
import functools
import math
import sys
import time

import numpy as np
import pytest
import torch

from podium.workers.reward.call import call_async, call_batch, call_row, is_async
from podium.workers.reward.outcome import Outcome, ScoreRequest, outcome_of_result

REQUEST = ScoreRequest("source", "1", "2", {"i": 3})


@pytest.mark.parametrize("result", [1, 1.0, True, np.float32(1), torch.tensor(1.0), np.array(1), {"score": 1}])
def test_numbers_and_dicts_are_scores(result):
    assert outcome_of_result(result) == Outcome("score", score=1.0)


def test_further_keys_are_kept():
    assert outcome_of_result({"score": 0.5, "acc": True}) == Outcome("score", score=0.5, extra={"acc": True})


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "it returned None; expected a number"),
        ("0.5", "it returned str ('0.5')"),
        ([1.0], "it returned list"),
        (1j, "it returned complex"),
        (math.nan, "it returned nan; expected a finite number"),
        (torch.tensor(-math.inf), "it returned -inf"),
        (torch.zeros(2), "it returned Tensor"),
        ({"acc": 1}, "it returned a dict without 'score' (acc)"),
        ({"score": None}, "it returned None"),
    ],
)
def test_anything_else_is_an_error_and_never_a_score(result, reason):
    outcome = outcome_of_result(result)
    assert (outcome.kind, outcome.score) == ("error", None)
    assert reason in outcome.reason


def test_a_dict_may_say_why_there_is_no_score():
    assert outcome_of_result({"abstain": "no\ntruth", "acc": 1}) == Outcome("abstain", reason="no truth")
    assert outcome_of_result({"abstain": None, "score": 1}).kind == "score"


def parse(text):
    return 1 / (int(text) - 1)


def raises(data_source, solution_str, ground_truth, extra_info):
    return parse(solution_str)


async def raises_async(**call):
    await asyncio.sleep(0)
    return raises(**call)


@pytest.mark.parametrize("fn", [raises, raises_async])
def test_an_exception_is_an_outcome_with_its_place(fn):
    outcome = call_row(fn, REQUEST)
    assert (outcome.kind, outcome.score) == ("error", None)
    assert outcome.reason.startswith("ZeroDivisionError: ") and "\n" not in outcome.reason
    assert outcome.reason.endswith("return 1 / (int(text) - 1)") and "return parse(solution_str)" in outcome.reason
    assert "Traceback" in outcome.traceback


def test_leaving_the_process_is_an_error_too():
    assert call_row(lambda **_: sys.exit(2), REQUEST).reason.startswith("SystemExit: 2")


def test_an_async_function_is_tried_again_within_its_time():
    calls = []

    async def fn(**call):
        calls.append(time.monotonic())
        if len(calls) < 3:
            raise ConnectionError("refused")
        return 1.0

    assert asyncio.run(call_async(fn, REQUEST, 10.0, 2)).score == 1.0
    first, second = calls[1] - calls[0], calls[2] - calls[1]
    assert 0.5 <= first < second
    calls.clear()
    assert "refused" in asyncio.run(call_async(fn, REQUEST, 10.0, 0)).reason
    calls.clear()
    late = asyncio.run(call_async(fn, REQUEST, 0.1, 5))
    assert late.kind == "timeout" and "attempt 1 failed with ConnectionError" in late.reason


def test_a_batch_is_one_call_with_lists():
    def fn(data_sources, solution_strs, ground_truths, extra_infos):
        return [
            {"score": float(text), "truth": truth} for text, truth in zip(solution_strs, ground_truths, strict=True)
        ]

    assert call_batch(fn, [REQUEST, REQUEST]) == [Outcome("score", score=1.0, extra={"truth": "2"})] * 2


@pytest.mark.parametrize("result", [[1.0], "ab", {"score": 1, "b": 2}, 1.0, None])
def test_what_is_no_list_of_as_many_results_is_an_error_of_all(result):
    outcomes = call_batch(lambda **_: result, [REQUEST, REQUEST])
    assert len(outcomes) == 2 and {outcome.kind for outcome in outcomes} == {"error"}


def test_a_row_of_a_batch_may_fail_alone():
    outcomes = call_batch(lambda **_: [1.0, None, float("nan"), {"abstain": "x"}], [REQUEST] * 4)
    assert [outcome.kind for outcome in outcomes] == ["score", "error", "error", "abstain"]


def test_what_is_async():
    class Judge:
        async def __call__(self, **call):
            return 1.0

    assert is_async(raises_async) and is_async(functools.partial(raises_async, a=1)) and is_async(Judge())
    assert not is_async(raises) and not is_async(functools.partial(raises, a=1))
