"""Each method by its name on the command line's own path, two steps of a small task, one process for all of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from podium.trainer.config import PPOConfig, check_config, load_config
from podium.trainer.config.methods import LOSSES
from podium.trainer.main_ppo import train
from podium.trainer.ppo.advantages import AdvantageEstimator
from podium.trainer.ppo.plan import GROUP_ESTIMATORS
from podium.utils.errors import UserError
from tests.small_task import SmallTask

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits; nothing to gain on every other prompt."""
    digits = min(6, sum(c.isdigit() for c in solution_str)) / 6
    odd = extra_info["index"] % 2
    return {"score": digits * odd, "digits": digits, "other": len(set(solution_str)) / 7}
'''
GRPO = {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__rollout__n": 4}
LOSS = "actor_rollout_ref__actor__policy_loss__loss_mode"
MINI = "actor_rollout_ref__actor__ppo_mini_batch_size"
CORRECTION = "algorithm__rollout_correction__"


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("reward") / "reward.py"
    file.write_text(REWARD)
    return file


@pytest.fixture
def run(task: SmallTask, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains two steps, each time in a directory of its own, and returns their metrics."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = (tmp_path / f"run{number}" for number in itertools.count())

    def call(**changes: Any) -> list[dict[str, Any]]:
        keys = {
            "custom_reward_function__path": reward,
            "data__val_files": None,
            "trainer__val_before_train": "false",
            "trainer__total_training_steps": 2,
            "trainer__logger": "[]",
        }
        run_dir = next(folders)
        config, explicit = load_config(PPOConfig, task.ppo(run_dir, **(keys | changes)))
        check_config(config, explicit)
        train(config)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return call


@pytest.mark.parametrize("name", AdvantageEstimator)
def test_every_estimator(run, name):
    extra = {"algorithm__gdpo_reward_keys": "[digits,other]"} if name == "gdpo" else {}
    n = 4 if name in GROUP_ESTIMATORS else 1
    steps = run(algorithm__adv_estimator=name.value, actor_rollout_ref__rollout__n=n, **extra)
    assert len(steps) == 2
    for step in steps:
        assert step["actor/grad_norm"] > 0 and step["training/first_ratio_dev_max"] < 1e-5
        assert ("critic/values/mean" in step) == (name == "gae")
        assert ("reward/greedy_baseline/mean" in step) == (name == "remax")


@pytest.mark.parametrize("name", LOSSES)
def test_every_policy_loss(run, name):
    steps = run(**GRPO, **{LOSS: name, MINI: 8})
    assert len(steps) == 2 and all(step["actor/grad_norm"] > 0 for step in steps)
    # The second mini-batch is off-policy.
    assert steps[0]["actor/ratio_dev_max"] > 0 and steps[0]["training/first_ratio_dev_max"] < 1e-5


def test_dr_grpo(run):
    mode = {"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum-norm"}
    mode |= {"algorithm__norm_adv_by_std_in_grpo": "false"}
    whole = run(**GRPO, **mode)[0]
    half = run(**GRPO, **mode, actor_rollout_ref__actor__loss_scale_factor=14)[0]
    assert whole["actor/grad_norm"] == pytest.approx(2 * half["actor/grad_norm"], rel=1e-4)


def test_weights_reach_the_loss(run):
    """Both engines run the same code here, so rho is 1: a band around it changes nothing, another leaves nothing."""
    plain = run(**GRPO)[0]
    inside = run(**GRPO, **{f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_is_threshold": "0.5_2"})[0]
    outside = run(**GRPO, **{f"{CORRECTION}rollout_is": "sequence", f"{CORRECTION}rollout_is_threshold": "2_3"})[0]
    assert inside["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    assert inside["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-5)
    assert outside["actor/grad_norm"] == 0 and outside["rollout_corr/rollout_is_clipped_fraction"] == 1
    assert plain["rollout_corr/ratio_max"] < 1.001  # reported uncorrected too


def test_rejection_reaches_the_loss_and_not_the_advantages(run):
    kinds, bands = "'seq_mean_k1,token_k3'", "'1.5_2,0.1'"
    step = run(**GRPO, **{f"{CORRECTION}rollout_rs": kinds, f"{CORRECTION}rollout_rs_threshold": bands})[0]
    assert step["actor/empty_steps"] == 1 and "actor/grad_norm" not in step, "nothing is left to learn from"
    assert step["rollout_corr/rollout_rs_masked_fraction"] == step["rollout_corr/rollout_rs_seq_masked_fraction"] == 1
    assert step["critic/advantages/max"] > 0


def test_a_rollout_of_less_precision_is_corrected(run):
    correction = {"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 1e-9}
    keys = {f"{CORRECTION}{key}": value for key, value in correction.items()}
    step = run(**GRPO, **keys, actor_rollout_ref__rollout__dtype="bfloat16")[0]
    assert 0 < step["rollout_corr/rollout_rs_masked_fraction"] < 1 and step["actor/grad_norm"] > 0
    assert 1 < step["rollout_corr/ratio_max"] < 1.2 and step["rollout_corr/rollout_is_eff_sample_size"] < 1
    assert step["training/first_ratio_dev_max"] < 1e-5


def test_bypass_saves_the_forward_and_changes_nothing_on_policy(run):
    plain, bypass = run(**GRPO)[0], run(**GRPO, **{f"{CORRECTION}bypass_mode": "true"})[0]
    assert bypass["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    assert "actor/old_entropy" in plain and "actor/old_entropy" not in bypass
    assert not any(name.startswith("rollout_corr/") for name in bypass)


def test_dapo(run):
    step = run(
        **GRPO,
        algorithm__filter_groups__enable="true",
        reward_model__overlong_buffer__enable="true",
        reward_model__overlong_buffer__len=3,
        actor_rollout_ref__actor__clip_ratio_high=0.28,
    )[0]
    # Half of the prompts have nothing to gain.
    assert step["filter_groups/num_gen_batches"] >= 2 and step["filter_groups/with_signal"] <= 0.75
    assert -1 <= step["reward/overlong_penalty/mean"] < 0 < step["reward/overlong/mean"]
    assert step["critic/score/min"] < 0 <= step["reward/score/min"]


def test_dynamic_sampling_that_finds_nothing_stops_the_run(run, tmp_path):
    file = tmp_path / "constant.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    limits = {"enable": "true", "max_num_gen_batches": 2}
    filter_groups = {f"algorithm__filter_groups__{key}": value for key, value in limits.items()}
    with pytest.raises(UserError, match="only 0 of 16 prompts got differing rewards in 2 batches"):
        run(**GRPO, **filter_groups, custom_reward_function__path=file)


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo(run, method):
    step = run(algorithm__use_pf_ppo="true", algorithm__pf_ppo__reweight_method=method)[0]
    assert 0 < step["pf_ppo/distinct"] < 1 and step["actor/grad_norm"] > 0


@pytest.mark.parametrize("kind", ["k1", "k3+", "abs+"])
def test_kl_in_the_loss(run, kind):
    actor = "actor_rollout_ref__actor__"
    steps = run(**GRPO, **{f"{actor}use_kl_loss": "true", f"{actor}kl_loss_coef": 0.1, f"{actor}kl_loss_type": kind})
    assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and abs(steps[1]["actor/kl_loss"]) > 1e-6


def test_adaptive_kl_in_the_reward(run):
    kl_ctrl = {"kl_coef": 0.1, "type": "adaptive", "target_kl": 1.0, "horizon": 100}
    steps = run(**{f"algorithm__kl_ctrl__{key}": value for key, value in kl_ctrl.items()})
    coefficients = [step["actor/reward_kl_penalty_coeff"] for step in steps]
    assert coefficients[1] == pytest.approx(coefficients[0] * (1 - 0.2 * 16 / 100))


UNREADY = {
    "unknown key of gdpo": (
        {**GRPO, "algorithm__adv_estimator": "gdpo", "algorithm__gdpo_reward_keys": "[digit]"},
        "did you mean 'digits'",
    ),
    "unknown metric": (
        {**GRPO, "algorithm__filter_groups__enable": "true", "algorithm__filter_groups__metric": "otter"},
        "did you mean 'other'",
    ),
    "unknown level": ({f"{CORRECTION}rollout_is": "tokens"}, "unknown rollout_is 'tokens'; did you mean 'token'"),
    "a band that is none": (
        {f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_is_threshold": "2_1"},
        "rollout_is_threshold is '2_1'",
    ),
    "no forward for sum_pi_squared": (
        {**GRPO, "algorithm__adv_estimator": "optimal_token_baseline", f"{CORRECTION}bypass_mode": "true"},
        "reads sum_pi_squared",
    ),
    "unknown estimator": ({"algorithm__adv_estimator": "grop"}, "did you mean 'grpo'"),
    "unknown loss": ({LOSS: "gmpo"}, "did you mean"),
    "plug-in that is not there": ({"trainer__plugins": "[nowhere.py]"}, "trainer.plugins=.*nowhere.py"),
}


@pytest.mark.parametrize("case", UNREADY)
def test_refused_before_any_worker_starts(run, tmp_path, case):
    changes, message = UNREADY[case]
    with pytest.raises(UserError, match=message):
        run(**changes)
    assert not (tmp_path / "run0" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("backend", "ranks"), [("local", 1), ("local", 2), ("ray", 1)])
def test_a_users_own_methods_reach_every_worker(run, backend, ranks):
    mine = ROOT / "recipes" / "write_your_own" / "mine.py"
    steps = run(
        trainer__plugins=f"[{mine}]",
        algorithm__adv_estimator="group_median",
        actor_rollout_ref__rollout__n=4,
        custom_reward_function__path=mine,
        trainer__backend=backend,
        trainer__n_gpus_per_node=ranks,
        **{LOSS: "spo", MINI: 8},
    )
    assert len(steps) == 2 and steps[0]["actor/ratio_dev_max"] > 0 and "reward/in_place/mean" in steps[0]
