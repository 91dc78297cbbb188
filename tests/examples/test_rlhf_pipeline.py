"""Every command line of the pipeline is one that its program accepts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

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


def test_command_lines(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" >> "$ARGUMENTS"; echo >> "$ARGUMENTS"\n')
    python.chmod(0o755)
    env = {"PYTHON": str(python), "RUNS": str(tmp_path / "runs"), "ARGUMENTS": str(tmp_path / "arguments")}
    result = subprocess.run(
        ["bash", ROOT / "examples" / "rlhf_pipeline_cpu.sh"],
        env={**os.environ, **env},
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    calls = [line.split("\0")[:-1] for line in (tmp_path / "arguments").read_text().splitlines()]
    programs = [call[1].rpartition(".")[2] if call[0] == "-m" else Path(call[0]).name for call in calls]
    line = ["main_generate", "main_eval"]
    assert programs == [
        "make_task.py", "main_sft", "main_generate", "make_pairs.py", "main_rm", "main_ppo", *line, *line, "report.py"
    ]  # fmt: skip
    for call, program in zip(calls, programs, strict=True):
        if program in CHECKS:
            cls, check = CHECKS[program]
            check(*load_config(cls, call[2:]))
        else:
            assert (ROOT / call[0]).is_file()
    assert "total time" in result.stdout
