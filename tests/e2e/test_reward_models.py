"""Reward models in processes of their own, and judges on both engines: the same numbers wherever they run."""

from pathlib import Path
from typing import Any

import pytest

from tests.copying import save_copying_model
from tests.e2e.commands import PPO, Result, metrics, run
from tests.e2e.test_ppo import ROLLOUT, close, computed, finished
from tests.small_task import SmallTask, save_random_reward_model

pytestmark = pytest.mark.slow

OWN_POOL = {"enable_resource_pool": "true", "n_gpus_per_node": 1}
COMMON = {"trainer__total_training_steps": 2, "reward_model__enable": "true", "reward_model__function_weight": 0}


@pytest.fixture(scope="module")
def reward_model(task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one in the policy's vocabulary."""
    return save_random_reward_model(task, tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def judge(task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One that tells how many digits a response has."""
    folder = tmp_path_factory.mktemp("judge")
    template = folder / "judge.jinja"
    template.write_text("{{ response | select('in', '0123456789') | list | length }}")
    return {
        "style": "generative",
        "model__path": save_copying_model(task.model, folder / "model"),
        "judge__template": template,
        "judge__verdict": "'^(\\d)'",
        "judge__max_prompt_length": 16,
        "judge__max_response_length": 2,
    }


def ppo(task: SmallTask, run_dir: Path, model: dict[str, Any], **changes: Any) -> Result:
    keys = {f"reward_model__{key}": value for key, value in model.items()}
    result = run(PPO, task.ppo(run_dir, **COMMON, **keys, **changes), timeout_s=600)
    finished(result)
    return result


@pytest.fixture(scope="module")
def together(task: SmallTask, reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run has computed whose roles are all in one process."""
    run_dir = tmp_path_factory.mktemp("together") / "run"
    ppo(task, run_dir, {"model__path": reward_model})
    return [computed(step) for step in metrics(run_dir)]


@pytest.mark.parametrize(("backend", "ranks"), [("local", 1), ("ray", 1), ("local", 2)])
def test_a_pool_of_its_own_changes_no_number(task, reward_model, together, tmp_path, backend, ranks):
    model = {"model__path": reward_model, **OWN_POOL, "n_gpus_per_node": ranks}
    result = ppo(task, tmp_path / "run", model, trainer__backend=backend)
    assert f"start {ranks} rank(s) on the {backend} backend: reward_model" in result.out
    assert f"reward model on {ranks} others" in result.out
    own = [computed(step) for step in metrics(tmp_path / "run")]
    assert len(own) == len(together) == 3 and own[1]["reward_model/score/std"] > 0
    for mine, theirs in zip(own, together, strict=True):
        close(mine, theirs, 1e-4)


@pytest.mark.parametrize(
    ("engine", "backend", "pool"),
    [("hf", "ray", OWN_POOL), ("vllm", "local", {}), ("vllm", "ray", OWN_POOL)],
    ids=["hf in a pool", "vllm beside the actor", "vllm in a pool"],
)
def test_a_judge_on_either_engine(task, judge, tmp_path, engine, backend, pool):
    """Its score is the number of digits; the function reports their share of six."""
    engines = {"rollout__name": engine, **({"rollout__max_num_seqs": 8} if engine == "vllm" else {})}
    result = ppo(task, tmp_path / "run", judge | engines | pool, trainer__backend=backend)
    assert ("judge on 1 others" in result.out) == bool(pool)
    for step in metrics(tmp_path / "run")[1:]:
        assert step["reward_model/failure_rate"] == 0 and step["reward_model/score/std"] > 0
        assert step["critic/score/mean"] == pytest.approx(step["reward_model/score/mean"])
        assert 6 * step["reward/score/mean"] <= step["reward_model/score/mean"] + 1e-6


def test_a_judge_and_the_policy_on_vllm_in_one_process(task, judge, tmp_path):
    keys = {"rollout__name": "vllm", "rollout__max_num_seqs": 8}
    ppo(task, tmp_path / "run", judge | keys, **{f"{ROLLOUT}name": "vllm", f"{ROLLOUT}max_num_seqs": 16})
    steps = metrics(tmp_path / "run")[1:]
    assert all(step["reward_model/failure_rate"] == 0 and step["training/first_ratio_dev_max"] < 1e-3 for step in steps)
