"""What a judge is asked, and what is read in its answer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.trainer.config.reward import JudgeConfig
from podium.utils.errors import UserError
from podium.workers.reward.judge import JudgeTemplate, Verdict
from podium.workers.reward.outcome import ScoreRequest

REQUEST = ScoreRequest("source", "It is 4 {{ prompt }}.", "4", {"level": 3}, prompt="What is 2 + 2?")


def verdict(pattern: str | None = None, score_range: tuple[float, float] = (0, 10)) -> Verdict:
    return Verdict(pattern or JudgeConfig().verdict, list(score_range), "judge")


def test_the_template_of_its_own_names_all_three():
    text = JudgeTemplate(None, "judge.template")(REQUEST)
    assert "Prompt:\nWhat is 2 + 2?\n" in text and "Right answer:\n4\n" in text
    assert "Response:\nIt is 4 {{ prompt }}.\n" in text, "what a policy writes is no template"
    assert text.endswith('"Score: N", N being from 0 to 10.')
    assert "Right answer" not in JudgeTemplate(None, "judge.template")(replace(REQUEST, ground_truth=None))


def test_a_chat_is_a_line_a_message(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    file = tmp_path / "judge.jinja"
    file.write_text("{{ prompt }}|{{ extra_info.level }}|{{ data_source }}")
    assert JudgeTemplate(str(file), "t")(replace(REQUEST, prompt=chat)) == "system: Be brief.\nuser: Why?|3|source"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "t=.*: there is no such file; give a Jinja template"),
        ("{{ prompt", "this is no Jinja template .TemplateSyntaxError: unexpected"),
        ("{{ prompt }} {{ answer }}", "t=.* reads answer; there are prompt, response, ground_truth"),
    ],
)
def test_a_template_that_is_none(tmp_path, text, message):
    file = tmp_path / "judge.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        JudgeTemplate(str(file), "t")


@pytest.mark.parametrize("text", ["{{ extra_info.nothing }}", "{{ ground_truth / 2 }}", "{{ prompt.__class__.mro() }}"])
def test_a_template_that_fails_on_a_row(tmp_path, text):
    file = tmp_path / "judge.jinja"
    file.write_text(text)
    with pytest.raises(UserError, match=r"t=.* fails \("):
        JudgeTemplate(str(file), "t")(REQUEST)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Good, but short.\nScore: 7", 7),
        ("**Score:** 7.5/10", 7.5),
        ("score = 0", 0),
        ("Score: **10**", 10),
        ("A score: 3 at first, but\nScore: 8", 8),
    ],
)
def test_a_score(answer, score):
    outcome = verdict()(answer, finished=True)
    assert outcome.kind == "score" and outcome.score == score


@pytest.mark.parametrize(
    ("answer", "finished", "reason"),
    [
        ("Very good!", True, "it has no match of"),
        ("Let me think", False, "it was cut at its length limit and has no match of"),
        ("", True, "no match"),
        ("Score: 11", True, "11 is not between 0 and 10"),
        ("Score: -3", True, "-3 is not between 0 and 10"),
        ("Score: ten", True, "no match"),
    ],
)
def test_what_is_no_score_is_an_error_and_never_0(answer, finished, reason):
    outcome = verdict()(answer, finished)
    assert outcome.kind == "error" and outcome.score is None and reason in outcome.reason
    assert outcome.traceback == answer


def test_a_group_that_holds_no_number():
    outcome = verdict(r"grade (\w+)")("grade A", finished=True)
    assert outcome.kind == "error" and "'A' is no number" in outcome.reason
    assert verdict(r"grade (\w+)")("grade nan", finished=True).kind == "error"


@given(st.text(), st.booleans())
def test_any_answer_has_an_outcome_on_the_scale(answer, finished):
    outcome = verdict()(answer, finished)
    assert outcome.kind == "error" or 0 <= outcome.score <= 10


@pytest.mark.parametrize(
    ("pattern", "score_range", "message"),
    [
        ("score (", (0, 1), "judge.verdict=score .: this is no regular expression"),
        (r"\d+", (0, 1), "expected one group, the number, not 0"),
        (r"(\d+)/(\d+)", (0, 1), "expected one group, the number, not 2"),
        (r"(\d+)", (1, 1), r"judge.score_range=\[1, 1\]: expected the least and the largest score"),
    ],
)
def test_settings_that_find_no_score(pattern, score_range, message):
    with pytest.raises(UserError, match=message):
        verdict(pattern, score_range)
