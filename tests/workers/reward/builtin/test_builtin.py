"""Each reward with what its users report: answers that were right and scored 0, and the other way round."""

import json
import subprocess
import sys

import pytest
import reasoning_gym

from podium.utils.errors import UserError
from podium.workers.reward import builtin
from podium.workers.reward.builtin.answers import final_answer, last_boxed


def score(name, solution, truth, **kwargs):
    result = builtin.find(name)(
        data_source=name, solution_str=solution, ground_truth=truth, extra_info=kwargs.pop("extra_info", None), **kwargs
    )
    return result["score"] if isinstance(result, dict) else result


GSM8K = [
    ("#### 72", "72", 1),
    ("so 5 and 7.\n#### 1,000", "1000", 1),
    ("#### 1000", "1,000", 1),
    ("#### $1,234.50", "1234.5", 1),
    ("#### 72.", "72", 1),
    ("#### 72.00", "72", 1),
    ("#### 18 dollars", "18", 1),
    ("#### -5", "-5", 1),
    ("#### 5", "-5", 0),
    ("#### .5", "0.5", 1),
    ("#### 10%", "10", 1),
    ("#### 5\nNo, wait.\n#### 6", "6", 1),  # wrong, then right
    ("#### 6\nNo, wait.\n#### 5", "6", 0),
    ("####", "72", 0),
    ("#### none", "72", 0),
    ("72\n#### 7", "72", 0),
    ("#### 720", "72", 0),
    ("The answer is 72 apples.", "72", 1),
    ("\\boxed{72} which is 3 more", "72", 1),
    ("nothing", "72", 0),
    ("", "72", 0),
    ("1.2.3", "3", 0),
    ("#### 72", "He has 8 * 9 = 72.\n#### 72", 1),  # the data set's own column
]


@pytest.mark.parametrize(("solution", "truth", "expected"), GSM8K)
def test_gsm8k(solution, truth, expected):
    assert score("gsm8k", solution, truth) == expected


def test_gsm8k_by_the_book_wants_the_mark():
    assert score("gsm8k", "The answer is 72", "72", method="strict") == 0
    assert score("gsm8k", "7 #### 72", "72", method="strict") == 1
    with pytest.raises(UserError, match="method=loose"):
        score("gsm8k", "1", "1", method="loose")
    with pytest.raises(ValueError, match="no number"):
        score("gsm8k", "1", "many")
    with pytest.raises(UserError, match=r"no reward_model.ground_truth"):
        score("gsm8k", "1", None)


MATH = [
    ("\\boxed{\\frac{1}{2}}", "\\frac12", 1),
    ("\\boxed{0.5}", "\\frac{1}{2}", 1),
    ("\\boxed{1/2}", "\\dfrac{1}{2}", 1),
    ("\\boxed{\\frac{\\sqrt{2}}{2}}", "\\frac{1}{\\sqrt{2}}", 1),
    ("\\boxed{1{,}000}", "1000", 1),
    ("\\boxed{1,000}", "1000", 1),
    ("\\boxed{5 \\text{ cm}}", "5", 1),
    ("\\boxed{\\$5}", "5", 1),
    ("\\boxed{10\\%}", "10", 1),
    ("\\boxed{x = 5}", "5", 1),
    ("\\boxed{90^\\circ}", "90", 1),
    ("\\boxed{(3, \\frac{\\pi}{2})}", "\\left( 3, \\frac{\\pi}{2} \\right)", 1),
    ("\\boxed{(2,1)}", "(1,2)", 0),
    ("\\boxed{1 + x}", "x+1", 1),
    ("\\boxed{\\text{even}}", "\\text{Even}", 1),
    ("\\boxed{neve}", "\\text{even}", 0),  # no product of letters
    ("\\boxed{\\text{(C)}}", "(C)", 1),
    ("\\boxed{}", "5", 0),
    ("\\boxed{5", "5", 0),  # cut off
    ("5", "5", 0),  # no answer is marked
    ("we get 5, but \\boxed{6}", "5", 0),
    ("\\boxed{4}, no: \\boxed{5}", "5", 1),
    ("\\boxed{5}, no: \\boxed{4}", "5", 0),
    ("Answer: 34", "34", 1),
    ("**Final Answer:** 34.", "34", 1),
    ("Answer: 33\n\nAnswer: $34$", "34", 1),
    ("the answer is 204", "204", 1),
    ("\\boxed{\\frac{}}", "5", 0),
    ("\\boxed{}}}{{\\\\", "5", 0),
    ("", "5", 0),
    ("\\boxed{113}", "The total is \\boxed{113}.", 1),  # a whole solution as ground truth
    ("\\boxed{073}", "73", 1),  # AIME
]


@pytest.mark.parametrize(("solution", "truth", "expected"), MATH)
def test_math(solution, truth, expected):
    assert score("math", solution, truth) == expected


def test_a_ground_truth_that_is_no_mathematics_is_an_error_and_no_zero():
    with pytest.raises(ValueError, match="no mathematics"):
        score("math", "\\boxed{5}", "")


CHOICE = [
    ("C", "C", 1),
    (" (c) ", "C", 1),
    ("The answer is (C).", "C", 1),
    ("Answer: C. Paris", "C", 1),
    ("\\boxed{C}", "(C)", 1),
    ("\\boxed{\\text{C}}", "C", 1),
    ("A is wrong. B is wrong. The answer is **C**.", "C", 1),
    ("The answer is B. No, the answer is C.", "C", 1),
    ("The answer is C. No, the answer is B.", "C", 0),
    ("The answer is A or C", "C", 0),
    ("A, B, C and D", "C", 0),
    ("I think Paris", "C", 0),
    ("\\boxed{}", "C", 0),
    ("", "C", 0),
]


@pytest.mark.parametrize(("solution", "truth", "expected"), CHOICE)
def test_multiple_choice(solution, truth, expected):
    assert score("multiple_choice", solution, truth) == expected


def test_a_truth_that_is_no_letter_is_an_error():
    with pytest.raises(ValueError, match="no letter"):
        score("multiple_choice", "C", "Paris")


ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ECHO = "```python\nprint(int(input()) + 1)\n```"
CODE = [
    (ADD, "assert add(1, 2) == 3", 1),
    (ADD, "assert add(1, 2) == 4", 0),
    ("def add(a, b):\n    return a + b\n", "assert add(1, 2) == 3", 1),
    ("```python\nadd = None\n```\nNo:\n" + ADD, "assert add(1, 2) == 3", 1),
    (ADD, {"inputs": [[1, 2], [2, 3]], "outputs": [3, 5], "fn_name": "add"}, 1),
    (ADD, {"inputs": [[1, 2], [2, 3]], "outputs": [3, 6], "fn_name": "add"}, 0),
    (ECHO, json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3"]}), 1),
    (ECHO, {"inputs": ["1\n", "2\n"], "outputs": ["2", "4"]}, 0),
    ("```\nimport sys\nprint(1)\nsys.exit()\n```", {"inputs": [""], "outputs": ["1"]}, 1),
    ("import os; os._exit(0)", "assert False", 0),
    ("import sys; sys.exit(0)", "assert False", 0),
    ("while True: pass", "", 0),
    ("import socket; socket.socket()", "", 0),
    ("import os; os.kill(-1, 9)", "", 0),
    ("import os; os.kill(os.getppid(), 9)", "", 0),
    ("import subprocess; subprocess.run(['true'])", "", 0),
    ("import os; os.fork()", "", 0),
    ("x = bytearray(4 << 30)", "", 0),
    ("open('f', 'wb').write(bytes(64 << 20))", "", 0),
    ("import os; assert 'SECRET' not in os.environ", "", 1),
    ("import threading; t = threading.Thread(target=print); t.start(); t.join()", "", 1),
    ("open('done', 'w').write('x')\nimport os; os._exit(0)", "", 0),
    ("syntax error", "", 0),
]


@pytest.mark.parametrize(("solution", "truth", "expected"), CODE)
def test_code(solution, truth, expected, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert score("code", solution, truth, time_limit_s=2.0 if "while True" in solution else 30.0) == expected


def test_tests_that_are_none_are_an_error():
    for truth in ({"inputs": []}, {"inputs": [], "outputs": []}, "[1]"):
        with pytest.raises(ValueError, match="ground truth"):
            score("code", ADD, truth)


FORMAT = [
    ("boxed_format", "so \\boxed{5}", 1),
    ("boxed_format", "\\boxed{}", 0),
    ("boxed_format", "\\boxed{5", 0),
    ("boxed_format", "\\boxed{5} \\boxed{6}", 0),
    ("boxed_format", "5", 0),
    ("think_format", "<think>a</think>\n<answer>5</answer>", 1),
    ("think_format", "a</think><answer>5</answer>\n", 1),  # the prompt has opened it
    ("think_format", "<think></think><answer>5</answer>", 0),
    ("think_format", "<think>a</think><answer>5</answer> and more", 0),
    ("think_format", "<think>a</think><answer>5</answer><answer>6</answer>", 0),
    ("think_format", "<answer>5</answer><think>a</think>", 0),
    ("think_format", "5", 0),
    ("json_format", '{"a": 1}', 1),
    ("json_format", '```json\n{"a": 1}\n```', 1),
    ("json_format", 'Sure: {"a": 1}', 0),
    ("json_format", "[1]", 0),
    ("json_format", "", 0),
]


@pytest.mark.parametrize(("name", "solution", "expected"), FORMAT)
def test_format(name, solution, expected):
    assert score(name, solution, None) == expected


def test_reasoning_gym_by_its_own_verifier():
    [entry] = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)
    info = {"question": entry["question"], "metadata": json.dumps(entry["metadata"])}
    fn = builtin.find("reasoning_gym")

    def call(solution, source="reasoning_gym/chain_sum"):
        return fn(data_source=source, solution_str=solution, ground_truth=entry["answer"], extra_info=info)

    assert call(entry["answer"]) == call(f"hm <answer> {entry['answer']} </answer>") == 1.0
    assert call("<answer>no</answer>") < 1.0
    assert call(entry["answer"], "reasoning_gym") == 1.0  # the metadata names the task
    with pytest.raises(UserError, match="no task 'sum_chain'"):
        call("1", "reasoning_gym/sum_chain")


def test_data_sources_choose():
    names = ["openai/gsm8k", "lighteval/MATH", "aime2024", "AIME_2025", "numina_olympiads", "apps", "reasoning_gym/x"]
    expected = ["gsm8k", "math", "math", "math", "math", "code", "reasoning_gym"]
    assert [builtin.name_for(name) for name in names] == expected
    assert set(builtin.SOURCES.values()) <= set(builtin.NAMES)
    with pytest.raises(UserError, match=r"data_source 'my/data'.*custom_reward_function.path"):
        builtin.name_for("my/data")
    with pytest.raises(UserError, match=r"custom_reward_function.name=gsm9k"):
        builtin.find("gsm9k")


def test_boxes():
    assert last_boxed("\\boxed{a{b}c} \\fbox{d}") == "d" and last_boxed("\\boxed{a{b}c}") == "a{b}c"
    assert last_boxed("\\boxed{a} \\boxed{b") is None and last_boxed("a") is None
    assert final_answer("Answer: 1 \\boxed{2}") == "2" and final_answer("so") is None


@pytest.mark.parametrize(("module", "extra"), [("math_verify", "math"), ("reasoning_gym", "reasoning-gym")])
def test_a_package_that_is_not_there_is_named(module, extra):
    name = {"math_verify": "math", "reasoning_gym": "reasoning_gym"}[module]
    code = (
        f"import sys; sys.modules['{module}'] = None\n"
        "from podium.workers.reward import builtin\n"
        f"try: builtin.find('{name}')\nexcept Exception as error: print(type(error).__name__, error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.startswith("UserError") and f"podium[{extra}]" in run.stdout
