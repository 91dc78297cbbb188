"""Every script's command line is one that its program accepts, and every file that it names is there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from podium.trainer.config import PPOConfig, check_config, load_config
from podium.trainer.layout import data_parallel_size
from tests.examples.calls import ROOT, assert_accepted, calls

SCRIPTS = sorted(
    str(file.relative_to(ROOT)) for folder in ("examples", "recipes") for file in (ROOT / folder).glob("*/run_*.sh")
)
ALGORITHMS = ("ppo", "grpo", "rloo", "reinforce_plus_plus", "remax", "gspo", "cispo", "dapo", "dr_grpo")


def arguments(script: str, tmp_path: Path, *extra: str) -> list[str]:
    """What the script gives to main_ppo."""
    [given] = calls(script, tmp_path, *extra)
    assert given[:2] == ["-m", "podium.trainer.main_ppo"], given[:4]
    return given[2:]


def test_a_cpu_script_makes_the_task_and_the_warm_start_where_they_are_not_there(tmp_path):
    programs = [call[:2] for call in calls("examples/grpo/run_grpo_cpu.sh", tmp_path, warm=False)]
    assert programs[0] == ["examples/quickstart/make_task.py", "--out"]
    assert programs[1:] == [["-m", "podium.trainer.main_sft"], ["-m", "podium.trainer.main_ppo"]]


def test_every_algorithm_has_a_script_for_gpus_and_one_for_a_cpu():
    for name in ALGORITHMS:
        assert f"examples/{name}/run_qwen2.5-0.5b_{name}.sh" in SCRIPTS
        assert f"examples/{name}/run_{name}_cpu.sh" in SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_line_is_accepted(script, tmp_path):
    argv = arguments(script, tmp_path, "trainer.experiment_name=last")
    config, explicit = load_config(PPOConfig, argv)
    check_config(config, explicit)
    assert argv[-1] == "trainer.experiment_name=last" and config.trainer.experiment_name == "last"
    for file in (config.custom_reward_function.path, *config.trainer.plugins):
        assert (ROOT / str(file)).is_file()
    actor, ranks = config.actor_rollout_ref.actor, config.trainer.nnodes * config.trainer.n_gpus_per_node
    shards = data_parallel_size("actor_rollout_ref.actor", actor.strategy, actor.megatron, ranks)
    mini_batch = actor.ppo_mini_batch_size
    assert config.data.train_batch_size % mini_batch == 0
    assert mini_batch * config.actor_rollout_ref.rollout.n % shards == 0


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_quickstart_gives_its_scripts_what_their_programs_accept(tmp_path, monkeypatch, algorithm):
    module = runpy.run_path(str(ROOT / "examples/quickstart/run.py"))
    commands: list[list[str]] = []
    main = module["main"]
    main.__globals__.update(run=lambda title, command, env: commands.append(command), summarize=lambda run_dir: 1.0)
    monkeypatch.setattr(sys, "argv", ["run.py", "--algorithm", algorithm, "--seed", "3"])
    main()
    scripts = [command for command in commands if command[0].endswith(".sh")]
    assert [Path(script).name for script, *_ in scripts] == ["sft.sh", f"run_{algorithm}_cpu.sh"]
    for script, *extra in scripts:
        for call in calls(script, tmp_path, *extra):
            assert_accepted(call)
