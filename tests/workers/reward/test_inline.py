import asyncio
import math
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from podium.workers.reward.inline import InlineScorer
from podium.workers.reward.outcome import Outcome, ScoreRequest, outcome_of_result


def requests(count):
    return [ScoreRequest("source", str(i), str(i), {"i": i}) for i in range(count)]


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


def parse(text):
    return 1 / (int(text) - 1)


def raises_in_one_row(data_source, solution_str, ground_truth, extra_info):
    return parse(solution_str)


async def raises_in_one_row_async(**call):
    await asyncio.sleep(0)
    return raises_in_one_row(**call)


@pytest.mark.parametrize("fn", [raises_in_one_row, raises_in_one_row_async])
def test_one_row_that_raises_leaves_the_others_scored(fn):
    scorer = InlineScorer(fn, concurrency=2)
    outcomes = scorer(requests(3))
    scorer.close()
    assert [outcome.kind for outcome in outcomes] == ["score", "error", "score"]
    assert [outcomes[0].score, outcomes[2].score] == [-1.0, 1.0]
    reason = outcomes[1].reason
    assert reason.startswith("ZeroDivisionError: ") and "\n" not in reason
    assert reason.endswith("return 1 / (int(text) - 1)") and "return parse(solution_str)" in reason
    assert "test_inline.py line" in reason and "inline.py line" not in reason.replace("test_inline.py", "")
    assert "Traceback" in outcomes[1].traceback


def test_async_calls_overlap_within_the_limit():
    running, most = 0, 0

    async def fn(**call):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return call["extra_info"]["i"]

    scorer = InlineScorer(fn, concurrency=4)
    start = time.monotonic()
    outcomes = scorer(requests(16))
    assert time.monotonic() - start < 16 * 0.02
    scorer.close()
    assert [outcome.score for outcome in outcomes] == list(range(16))
    assert most == 4


def test_async_calls_share_one_loop_and_work_inside_another():
    loops = set()

    async def fn(**call):
        loops.add(asyncio.get_running_loop())
        return 0

    scorer = InlineScorer(partial(fn), concurrency=2)
    scorer(requests(2))

    async def elsewhere():
        return scorer(requests(2))

    assert len(asyncio.run(elsewhere())) == 2
    assert len(loops) == 1
    scorer.close()
    scorer.close()
    assert "reward" not in {thread.name for thread in threading.enumerate()}
    assert len(scorer(requests(1))) == 1  # and it can be used again
    scorer.close()


def test_plain_functions_run_in_the_callers_thread():
    scorer = InlineScorer(lambda **call: float(threading.current_thread() is threading.main_thread()), concurrency=2)
    assert [outcome.score for outcome in scorer(requests(2))] == [1.0, 1.0]
