"""What a generative reward model is asked about a response, and the score in what it answers."""

import re
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from podium.utils.dataset_text import chat_as_text
from podium.utils.errors import UserError
from podium.workers.reward.outcome import Outcome, ScoreRequest

VARIABLES = ("prompt", "response", "ground_truth", "data_source", "extra_info")
"""What a template may read; ``prompt`` is text, of a chat a line ``role: content`` for each message."""

DEFAULT_TEMPLATE = """\
Judge how well the response does what the prompt asks for, from 0 (useless) to 10 (could not be better).

Prompt:
{{ prompt }}
{% if ground_truth is not none %}

Right answer:
{{ ground_truth }}
{% endif %}

Response:
{{ response }}

Say in one sentence what is good and what is wrong about it. Then end with a line "Score: N", N being from 0 to 10."""

_SHOWN = 120


class JudgeTemplate:
    """A Jinja template over `VARIABLES`, run in a sandbox.

    Args:
        path: of the file; None is `DEFAULT_TEMPLATE`.
        key: configuration key, for errors.

    Raises:
        UserError: no such file, a file that is no template, or one that reads what there is not.
    """

    def __init__(self, path: str | None, key: str):
        self._name = f"{key}={path}"
        source = DEFAULT_TEMPLATE if path is None else self._read(Path(path).expanduser())
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        try:
            unknown = meta.find_undeclared_variables(environment.parse(source)) - set(VARIABLES)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"{self._name}: this is no Jinja template ({_one_line(error)})") from error
        if unknown:
            raise UserError(f"{self._name} reads {', '.join(sorted(unknown))}; there are {', '.join(VARIABLES)}")

    def _read(self, file: Path) -> str:
        if not file.is_file():
            raise UserError(f"{self._name}: there is no such file; give a Jinja template")
        return file.read_text(encoding="utf-8")

    def __call__(self, request: ScoreRequest) -> str:
        """What to ask about a response.

        Raises:
            UserError: the template fails on it.
        """
        try:
            return self._template.render(
                prompt=chat_as_text(request.prompt),
                response=request.solution_str,
                ground_truth=request.ground_truth,
                data_source=request.data_source,
                extra_info=request.extra_info,
            )
        except Exception as error:  # a template raises what it likes
            raise UserError(f"{self._name} fails ({_one_line(error)})") from error


class Verdict:
    """Reads the score in a judge's answer: the last match of a regular expression counts.

    Args:
        pattern: with one group, the number.
        score_range: least and largest score.
        key: configuration key above ``verdict`` and ``score_range``, for errors.

    Raises:
        UserError: no regular expression, not one group, or no range.
    """

    def __init__(self, pattern: str, score_range: list[float], key: str):
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise UserError(f"{key}.verdict={pattern}: this is no regular expression ({error})") from error
        if self._pattern.groups != 1:
            raise UserError(f"{key}.verdict={pattern}: expected one group, the number, not {self._pattern.groups}")
        if len(score_range) != 2 or not score_range[0] < score_range[1]:
            raise UserError(f"{key}.score_range={score_range}: expected the least and the largest score")
        self._low, self._high = score_range

    def __call__(self, answer: str, finished: bool) -> Outcome:
        """The score; an ``error`` where there is none, or none on the scale.

        Args:
            finished: False for an answer that was cut at its length limit. One that already has its score counts.
        """
        found = self._pattern.findall(answer)
        if not found:
            why = "it has" if finished else "it was cut at its length limit and has"
            return self._error(f"{why} no match of '{self._pattern.pattern}'", answer)
        try:
            score = float(found[-1])
        except ValueError:
            return self._error(f"'{found[-1]}' is no number", answer)
        if not self._low <= score <= self._high:  # a NaN is in no range
            return self._error(f"{score:g} is not between {self._low:g} and {self._high:g}", answer)
        return Outcome("score", score=score)

    def _error(self, why: str, answer: str) -> Outcome:
        text = " ".join(answer.split())
        shown = text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"
        return Outcome("error", reason=f"the judge's answer gives no score: {why}: {shown!r}", traceback=answer)


def _one_line(error: Any) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
