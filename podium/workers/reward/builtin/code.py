"""Programs, judged by tests that run them in a sandbox."""

import json
import re
from collections.abc import Mapping
from typing import Any

from podium.workers.reward.builtin.answers import require_truth
from podium.workers.reward.builtin.sandbox import run_python

_BLOCK = re.compile(r"```(?:python|py|Python)?[ \t]*\n(.*?)```", re.DOTALL)
_CALL = """
import json as _json
for _arguments, _expected in _json.loads({cases!r}):
    _function = globals().get({name!r}) or getattr(Solution(), {name!r})
    _got = _json.loads(_json.dumps(_function(*_arguments)))
    assert _got == _expected, (_arguments, _got, _expected)
"""


def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    time_limit_s: float = 5.0,
) -> dict[str, Any]:
    """Score 1 when the program passes all tests, else 0; with ``passed``, the share before the first that failed.

    The program is the last fenced block of the response, or all of it. The ground truth is Python that raises when a
    test fails (asserts); or a mapping, or its JSON text: ``inputs`` and ``outputs``, standard input and output of each
    test, or arguments and result of the function ``fn_name``. Output is compared word by word.

    Args:
        time_limit_s: seconds for a test.

    Raises:
        ValueError: tests that are neither.
    """
    blocks = _BLOCK.findall(solution_str)
    program = blocks[-1] if blocks else solution_str
    tests = _tests(require_truth(ground_truth, data_source) if isinstance(ground_truth, str | None) else ground_truth)
    if isinstance(tests, str):
        passed = float(run_python(program, tests, time_limit_s=time_limit_s).finished)
        return {"score": passed, "passed": passed}
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    if tests.get("fn_name"):
        call = _CALL.format(cases=json.dumps(list(zip(inputs, outputs, strict=True))), name=tests["fn_name"])
        passed = float(run_python(program, call, time_limit_s=time_limit_s).finished)
        return {"score": passed, "passed": passed}
    count = 0
    for given, expected in zip(inputs, outputs, strict=True):
        run = run_python(program, stdin=given, time_limit_s=time_limit_s)
        if not run.finished or run.output.split() != expected.split():
            break
        count += 1
    return {"score": float(count == len(inputs)), "passed": count / len(inputs)}


def _tests(ground_truth: Any) -> Any:
    """Python text, or a mapping with ``inputs`` and ``outputs``."""
    if isinstance(ground_truth, str):
        try:
            parsed = json.loads(ground_truth)
        except ValueError:
            return ground_truth
        ground_truth = parsed
    if not isinstance(ground_truth, Mapping) or not {"inputs", "outputs"} <= set(ground_truth):
        raise ValueError("ground truth is neither Python nor a mapping with inputs and outputs")
    return ground_truth
