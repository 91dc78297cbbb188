"""Every command line of the pipelines is one that its program accepts."""

from __future__ import annotations

import pytest

from tests.examples.calls import assert_accepted, calls, program

PIPELINES = {
    "rlhf_pipeline_cpu.sh": [
        "make_task.py", "main_sft", "main_generate", "make_pairs.py", "main_rm", "main_ppo",
        "main_generate", "main_eval", "main_generate", "main_eval", "report.py",
    ],
    "judge_cpu.sh": [
        "make_task.py", "main_sft", "main_generate", "make_pairs.py", "make_verdicts.py", "main_sft", "main_ppo",
    ],
}  # fmt: skip


@pytest.mark.parametrize("script", PIPELINES)
def test_command_lines(tmp_path, script):
    given = calls(f"examples/{script}", tmp_path, warm=False)
    assert [program(call) for call in given] == PIPELINES[script]
    for call in given:
        assert_accepted(call)
