import pickle
import sys

import pytest

from podium.utils.errors import UserError
from podium.workers.reward.functions import BATCH_ARGUMENTS, RewardSource, default_compute_score

CALL = {"data_source": "x", "solution_str": "12", "ground_truth": "12", "extra_info": {}}
GOOD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return float(solution_str == ground_truth) + bonus
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="my_reward.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def test_a_function_of_a_file_with_keyword_arguments(write):
    path = write(GOOD)
    assert RewardSource(path).load()(**CALL) == 1.0
    assert RewardSource(path, "compute_score", {"bonus": 0.5}).load()(**CALL) == 1.5


def test_classes_of_the_file_work(write):
    path = write(
        """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Score:
    value: float

class Judge:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return Score(0.25).value

compute_score = Judge()
"""
    )
    assert RewardSource(path).load()(**CALL) == 0.25


def test_it_pickles_without_the_function():
    source = RewardSource("nowhere.py", kwargs={"bonus": 0.5})
    assert pickle.loads(pickle.dumps(source)) == source and str(source) == "compute_score in nowhere.py"


def test_the_batched_form_has_arguments_of_its_own(write):
    path = write("def compute_score(data_sources, solution_strs, ground_truths, extra_infos): return [1]\n")
    assert RewardSource(path, arguments=BATCH_ARGUMENTS).load()(**dict.fromkeys(BATCH_ARGUMENTS)) == [1]
    with pytest.raises(UserError, match=r"it takes all responses in a call: set reward_model.reward_manager=batch"):
        RewardSource(path).load()
    with pytest.raises(UserError, match=r"data_sources, solution_strs.* leave out reward_model.reward_manager=batch"):
        RewardSource(write(GOOD), arguments=BATCH_ARGUMENTS).load()


def test_a_class_is_no_function_and_its_instance_is(write):
    path = write("class Judge:\n    def __call__(self, **call): return 1.0\njudge = Judge()\n")
    assert RewardSource(path, "judge").load()(**CALL) == 1.0
    assert "that is a class; name an instance of it, made there (judge = Judge())" in failure(path, "Judge")


def test_the_quickstarts_reward_loads():
    assert RewardSource("examples/quickstart/reward.py").load()(**CALL) == 1.0


def failure(path, name="compute_score", kwargs=None):
    with pytest.raises(UserError) as caught:
        RewardSource(path, name, kwargs or {}).load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_do_not_load_are_told_with_the_line(write, tmp_path):
    assert "custom_reward_function.path" in failure(str(tmp_path / "no.py"))
    assert "there is no such file" in failure(str(tmp_path / "no.py"))
    assert "not a Python file" in failure(write("", "reward.txt"))
    text = failure(write("import os\n\nimport no_such_module_here\n"))
    assert "importing it fails at line 3 with ModuleNotFoundError: No module named 'no_such_module_here'" in text
    assert "at line 2 with SyntaxError" in failure(write("x = 1\ndef f(:\n"))
    assert "at line 1 with SystemExit: 3" in failure(write("raise SystemExit(3)\n"))
    # An error deep in a library is told by the line of the file that led there.
    assert "at line 4 with JSONDecodeError" in failure(write("import json\n\ndef f():\n    json.loads('{')\n\nf()\n"))
    assert not [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]


def test_names_that_are_not_there(write):
    path = write(GOOD + "LIMIT = 3\n")
    assert "custom_reward_function.name=compute_scor" in failure(path, "compute_scor")
    assert "did you mean compute_score?" in failure(path, "compute_scor")
    assert "it has compute_score" in failure(path, "zzz")
    assert "that is int, not a function" in failure(path, "LIMIT")
    assert "no functions" in failure(write(""), "f")


def test_signatures_that_cannot_be_called(write):
    text = failure(write("def compute_score(answer, truth): return 1\n"))
    assert "compute_score(answer, truth)" in text
    assert "data_source, solution_str, ground_truth, extra_info" in text
    assert "missing a required argument" in text or "unexpected keyword argument" in text
    assert "unexpected keyword argument 'bonsu'" in failure(write(GOOD), kwargs={"bonsu": 1})
    assert "'extra_info', which every call already passes" in failure(write(GOOD), kwargs={"extra_info": 1})


def test_without_a_path_the_data_source_chooses():
    assert RewardSource().load().func is default_compute_score
    with pytest.raises(UserError, match=r"unexpected keyword argument 'a'"):
        RewardSource(kwargs={"a": 1}).load()
    call = {"data_source": "x", "solution_str": "9 or 8", "ground_truth": "8"}
    assert RewardSource(name="gsm8k").load()(**call) == 1.0
    assert RewardSource(name="gsm8k", kwargs={"method": "strict"}).load()(**call) == 0.0
    with pytest.raises(UserError, match=r"custom_reward_function.name=gsm: .*gsm8k"):
        RewardSource(name="gsm").load()
    assert default_compute_score("exact_match", " 12\n", 12) == 1.0
    assert default_compute_score("exact_match", "21", "12") == 0.0
    with pytest.raises(UserError, match=r"data_source 'my/data'.*custom_reward_function.path"):
        default_compute_score("my/data", "1", "1")
    with pytest.raises(UserError, match=r"no reward_model.ground_truth"):
        default_compute_score("exact_match", "1", None)
