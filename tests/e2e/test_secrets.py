"""What a run was given and must not tell: it is nowhere in what the run leaves, and a replay can have it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import PPO, Preloaded
from tests.e2e.test_resume import finished, refused
from tests.small_task import SmallTask

KEY = "custom_reward_function.reward_kwargs.headers.Authorization"
SECRETS = ("tok-from-environment", "tok-literal", "me:pw")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, headers=None, url=None):
    token = headers["Authorization"].removeprefix("Bearer ")
    if token not in ("tok-from-environment", "tok-literal"):
        raise PermissionError(f"401 for {headers} at {url}")
    if len(solution_str) % 4 == 1 and solution_str != ground_truth:
        raise OSError(f"429 for {token} at {url}")
    return min(6, sum(c.isdigit() for c in solution_str)) / 6
"""


@pytest.fixture
def changes(tmp_path: Path) -> dict[str, Any]:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    return {
        "custom_reward_function__path": reward,
        "custom_reward_function__reward_kwargs__url": "'https://me:pw-12345@host/'",
        "reward_model__max_failure_rate": 0.9,
        "trainer__save_freq": 1,
        "trainer__total_training_steps": 2,
    }


def left_behind(run_dir: Path) -> str:
    return "".join(
        file.read_text(errors="replace")
        for file in run_dir.rglob("*")
        if file.is_file() and file.suffix != ".safetensors"
    )


def test_a_secret_from_the_environment_is_read_from_there_again(
    command: Preloaded, task: SmallTask, tmp_path: Path, changes: dict[str, Any]
):
    run_dir, env = tmp_path / "run", {"JUDGE_TOKEN": "tok-from-environment"}
    argv = [*task.ppo(run_dir, **changes), f"{KEY}='Bearer ${{oc.env:JUDGE_TOKEN}}'"]
    result = command(PPO, argv, env=env)
    finished(result)
    told = result.out + result.err + left_behind(run_dir)
    assert "OSError: 429 for ${oc.env:JUDGE_TOKEN} at https://<redacted>@host/" in told and not any(
        secret in told for secret in SECRETS
    )

    replay = ["replay", str(run_dir), "--step", "2"]
    url = ["--secret", "custom_reward_function.reward_kwargs.url=https://me:pw-12345@host/"]
    result = command("podium", [*replay, *url], env=env)
    finished(result)
    assert "replay of step 2: every metric equal" in result.out
    refused(command("podium", [*replay, *url]), f"{KEY}: ", "Environment variable 'JUDGE_TOKEN' not found")
    refused(command("podium", replay, env=env), "reward_kwargs.url: a secret is not written down", "--secret '")
    finished(command("podium", ["export", str(run_dir), str(tmp_path / "exported")]))  # it needs none


def test_a_secret_that_is_nowhere_must_be_given_again(
    command: Preloaded, task: SmallTask, tmp_path: Path, changes: dict[str, Any]
):
    run_dir = tmp_path / "run"
    changes.pop("custom_reward_function__reward_kwargs__url")
    result = command(PPO, [*task.ppo(run_dir, **changes), f"{KEY}='Bearer tok-literal'"])
    finished(result)
    told = result.out + result.err + left_behind(run_dir)
    assert "OSError: 429 for <redacted>" in told and not any(secret in told for secret in SECRETS)

    replay = ["replay", str(run_dir), "--step", "2"]
    refused(command("podium", replay), f"{KEY}: a secret is not written down", f"--secret '{KEY}=${{oc.env:NAME}}'")
    refused(command("podium", [*replay, "--secret", "trainer.seed=1"]), "--secret trainer.seed: the run has no secret")
    result = command("podium", [*replay, "--secret", f"{KEY}=Bearer tok-literal"])
    finished(result)
    assert "replay of step 2: every metric equal" in result.out
