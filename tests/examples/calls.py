"""What an example's scripts ask of Podium's programs, found out by a Python that only writes its arguments down."""

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
_CHECKS: dict[str, tuple[type, Any]] = {
    "main_sft": (SFTConfig, check_sft_config),
    "main_rm": (RMConfig, check_rm_config),
    "main_ppo": (PPOConfig, check_config),
    "main_generate": (GenerateConfig, check_generate_config),
    "main_eval": (EvalConfig, check_eval_config),
}


def calls(script: str | Path, tmp_path: Path, *extra: str, warm: bool = True) -> list[list[str]]:
    """The arguments of each Python that the script starts.

    Args:
        warm: the task and the warm start are there.
    """
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" >> "$ARGUMENTS"; echo >> "$ARGUMENTS"\n')
    python.chmod(0o755)
    task, runs, arguments = tmp_path / "task", tmp_path / "runs", tmp_path / "arguments"
    arguments.write_text("")
    if warm:
        for file in (task / "val.parquet", runs / "sft" / "export" / "config.json"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    env = {"PYTHON": str(python), "TASK": str(task), "RUNS": str(runs), "ARGUMENTS": str(arguments)}
    subprocess.run(["bash", ROOT / script, *extra], env={**os.environ, **env}, check=True, timeout=60)
    return [line.split("\0")[:-1] for line in arguments.read_text().splitlines()]


def program(call: list[str]) -> str:
    """The name of the module or file that a Python runs."""
    return call[1].rpartition(".")[2] if call[0] == "-m" else Path(call[0]).name


def assert_accepted(call: list[str]) -> None:
    """That Podium's program takes its arguments, or that another is there."""
    if program(call) in _CHECKS:
        cls, check = _CHECKS[program(call)]
        check(*load_config(cls, call[2:]))
    else:
        assert (ROOT / call[0]).is_file()
