"""Managers that the configuration chooses, over real processes."""

from pathlib import Path

import pytest

from podium.trainer.config.reward import RewardFunctionConfig, RewardModelConfig
from podium.utils.errors import UserError
from podium.workers.reward.build import build_scorer
from podium.workers.reward.outcome import ScoreRequest

BATCH = """
import os, time
calls = 0
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    global calls
    calls += 1
    for text in solution_strs:
        if text == "raise":
            raise ValueError("bad text")
        if text == "hang":
            time.sleep(1000)
        if text == "exit":
            os._exit(9)
    return [{"score": float(text) + bonus, "rows": len(solution_strs)} for text in solution_strs]
"""


@pytest.fixture
def score(tmp_path):
    def run(text, texts, function=None, **model):
        path = tmp_path / "reward.py"
        path.write_text(text)
        keys = {"path": str(path), **(function or {})}
        scorer = build_scorer(RewardModelConfig(num_workers=2, **model), RewardFunctionConfig(**keys))
        outcomes = scorer([ScoreRequest("source", text, "1", {}) for text in texts])
        scorer.close()
        return outcomes

    return run


def test_the_batched_form_is_one_call(score):
    outcomes = score(BATCH, ["1", "2", "3"], {"reward_kwargs": {"bonus": 0.5}}, reward_manager="batch")
    assert [outcome.score for outcome in outcomes] == [1.5, 2.5, 3.5]
    assert {outcome.extra["rows"] for outcome in outcomes} == {3}
    assert score(BATCH, [], reward_manager="batch") == []


@pytest.mark.parametrize(
    ("deed", "kind", "reason"),
    [("raise", "error", "bad text"), ("hang", "timeout", "no result in 1 s"), ("exit", "error", "exit code 9")],
)
def test_a_batch_that_fails_is_halved_until_the_cause_is_alone(score, deed, kind, reason):
    texts = [str(i) for i in range(20)]
    outcomes = score(BATCH, [*texts[:7], deed, *texts[7:]], reward_manager="batch", timeout_s=1.0)
    guilty = outcomes.pop(7)
    assert guilty.kind == kind and reason in guilty.reason
    assert [outcome.score for outcome in outcomes] == list(map(float, texts))


def test_a_list_of_another_length_is_not_halved_until_it_fits(score):
    """One result is right for one response, and wrong for three."""
    fn = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): return [1.0]\n"
    outcomes = score(fn, ["1", "2", "3"], reward_manager="batch")
    assert {outcome.kind for outcome in outcomes} == {"error"}
    assert "it returned 1 results for 3 responses" in outcomes[0].reason


def test_a_batch_in_which_all_fails_ends(score):
    outcomes = score(BATCH, ["raise"] * 300, reward_manager="batch")
    assert {outcome.kind for outcome in outcomes} == {"error"} and len(outcomes) == 300


PARTS = """
import asyncio
def right(solution_str, ground_truth, **_):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
def short(solution_str, limit, **_):
    return float(len(solution_str) <= limit)
async def slow(**_):
    await asyncio.sleep(0.2)
    return 1.0
def none(**_):
    return None
def unsure(**_):
    return {"abstain": "unsure"}
"""


def test_several_sources_are_summed_with_weights(score, tmp_path):
    path = str(tmp_path / "reward.py")
    sources = {
        "right": {"path": path, "name": "right", "weight": 2},
        "short": {"path": path, "name": "short", "weight": -0.5, "reward_kwargs": {"limit": 1}},
    }
    outcomes = score(PARTS, ["1", "100"], {"path": None, "sources": sources})
    assert [outcome.score for outcome in outcomes] == [1.5, 0.0]
    assert outcomes[0].extra == {"right": 1.0, "right/length": 1, "short": 1.0}
    sources["slow"] = {"path": path, "name": "slow"}
    outcomes = score(PARTS, ["1"] * 32, {"path": None, "sources": sources})
    assert [outcome.score for outcome in outcomes] == [2.5] * 32
    for name, kind, reason in (("none", "error", "last: it returned None"), ("unsure", "abstain", "last: unsure")):
        sources["last"] = {"path": path, "name": name}
        [outcome] = score(PARTS, ["1"], {"path": None, "sources": sources})
        assert outcome.kind == kind and reason in outcome.reason


def test_sources_that_cannot_be_meant():
    for settings, message in (
        ("x.py", "sources.a=x.py: expected"),
        ({"path": "x.py", "wieght": 1}, "sources.a.wieght: there is no such key"),
        ({"path": "x.py", "weight": "1"}, "sources.a.weight=1: expected a number"),
    ):
        with pytest.raises(UserError, match=message):
            build_scorer(RewardModelConfig(), RewardFunctionConfig(sources={"a": settings}))


def test_what_scores_has_a_name():
    names = [
        build_scorer(RewardModelConfig(), RewardFunctionConfig(path="a.py")).describe(),
        build_scorer(RewardModelConfig(), RewardFunctionConfig()).describe(),
        build_scorer(RewardModelConfig(reward_manager="remote", url="http://h/s"), RewardFunctionConfig()).describe(),
    ]
    assert names == ["compute_score in a.py", "built in for the data_source", "at http://h/s"]


def test_the_gsm8k_examples_reward_is_one(score):
    text = Path("examples/gsm8k/reward.py").read_text()
    assert [outcome.score for outcome in score(text, ["so 1", "#### 2"])] == [1.0, 0.0]


SECRETS = """
import os
def compute_score(ARGUMENTS, api_key=None, headers=None):
    print("posting with", api_key)
    try:
        raise OSError(f"401 for {api_key} at https://me:pw@host?key=" + os.environ["JUDGE_API_KEY"])
    finally:
        print(headers)
"""


@pytest.mark.parametrize("manager", ["naive", "batch"])
def test_no_failure_tells_a_secret(score, monkeypatch, capsys, manager):
    monkeypatch.setenv("JUDGE_API_KEY", "jk-from-environment")
    names = "data_source, solution_str, ground_truth, extra_info"
    taken = ", ".join(f"{name}s" for name in names.split(", ")) if manager == "batch" else names
    kwargs = {"api_key": "sk-configured", "headers": {"Authorization": "Bearer tok-configured"}}
    text = SECRETS.replace("ARGUMENTS", taken)
    outcomes = score(text, ["1", "2"], {"reward_kwargs": kwargs}, reward_manager=manager)
    for outcome in outcomes:
        told = outcome.reason + outcome.traceback
        assert "OSError: 401 for <redacted> at https://<redacted>@host?key=${oc.env:JUDGE_API_KEY}" in told
        assert not any(secret in told for secret in ("jk-from", "configured", "me:pw"))
    printed = capsys.readouterr().out
    assert "posting with <redacted>\n{'Authorization': '<redacted>'}" in printed and "configured" not in printed
