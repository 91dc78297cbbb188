"""Every command line of the pipelines is one that its program accepts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from podium.trainer.config import (
    EvalConfig,
    GenerateConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    check_config,
    check_eval_config,
    check_generate_config,
    check_rm_config,
    check_sft_config,
    load_config,
)

ROOT = Path(__file__).parents[2]
CHECKS: dict[str, tuple[type, Any]] = {
    "main_sft": (SFTConfig, check_sft_config),
    "main_rm": (RMConfig, check_rm_config),
    "main_ppo": (PPOConfig, check_config),
    "main_generate": (GenerateConfig, check_generate_config),
    "main_eval": (EvalConfig, check_eval_config),
}


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
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" >> "$ARGUMENTS"; echo >> "$ARGUMENTS"\n')
    python.chmod(0o755)
    folders = {name: str(tmp_path / name.lower()) for name in ("PYTHON", "TASK", "RUNS", "ARGUMENTS")}
    subprocess.run(
        ["bash", ROOT / "examples" / script],
        env={**os.environ, **folders},
        check=True,
        timeout=60,
    )
    calls = [line.split("\0")[:-1] for line in (tmp_path / "arguments").read_text().splitlines()]
    programs = [call[1].rpartition(".")[2] if call[0] == "-m" else Path(call[0]).name for call in calls]
    assert programs == PIPELINES[script]
    for call, program in zip(calls, programs, strict=True):
        if program in CHECKS:
            cls, check = CHECKS[program]
            check(*load_config(cls, call[2:]))
        else:
            assert (ROOT / call[0]).is_file()
