"""PPO against a reward model: its scores in the batch, beside a function, and in validation."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from podium.protocol import DataProto
from podium.trainer.config import PPOConfig, check_config, load_config
from podium.trainer.config.reward import OverlongBufferConfig, RewardModelConfig
from podium.trainer.main_ppo import train
from podium.trainer.ppo.model_reward import ModelReward, Noting, TokenScores, normalized
from podium.trainer.ppo.scoring import Scoring
from podium.utils.errors import UserError
from podium.utils.torch_functional import place_on_last_token
from tests.small_task import save_random_reward_model


class Group:
    """Gives out scores as the workers do."""

    def __init__(self, scores):
        self.scores = torch.tensor(scores)

    def compute_rm_score(self, batch):
        return DataProto.from_dict({"rm_scores": place_on_last_token(self.scores, batch.batch["response_mask"])})


def batch(*lengths: int) -> DataProto:
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    rest = {name: torch.zeros(len(lengths), 5) for name in ("input_ids", "attention_mask", "position_ids", "responses")}
    return DataProto.from_dict({**rest, "response_mask": mask})


def function(given: DataProto, outcomes: None = None) -> DataProto:
    scores = place_on_last_token(torch.ones(len(given)), given.batch["response_mask"])
    return DataProto.from_dict({"token_level_scores": scores}, meta_info={"metrics": {"reward/score/mean": 1.0}})


def reads_tokens(scores: list[float], run_dir: Path, most: float = 0.25) -> TokenScores:
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [str(row) for row in ids], eos_token_id=1)
    return TokenScores(Group(scores), Noting("reward model rm", tokenizer, most, run_dir))


def test_the_model_alone(tmp_path):
    model = ModelReward(reads_tokens([2.0, 4.0, 9.0], tmp_path), RewardModelConfig(enable=True, weight=0.5))
    scored = Scoring(None, OverlongBufferConfig(), 5, model)(batch(3, 1, 0))
    assert scored.batch["token_level_scores"].tolist() == [[0, 0, 1, 0, 0], [2, 0, 0, 0, 0], [0] * 5]
    assert scored.batch["sequence_scores"].tolist() == [1, 2, 0]
    metrics = scored.meta_info["metrics"]
    assert metrics["reward_model/score/mean"] == 3.0 and metrics["reward_model/score/max"] == 4.0
    assert metrics["reward_model/reward/mean"] == 1.0


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_beside_a_function(weight, tmp_path):
    model = ModelReward(reads_tokens([2.0, 4.0], tmp_path), RewardModelConfig(enable=True))
    scored = Scoring(function, OverlongBufferConfig(), 5, model, weight)(batch(3, 1))
    assert scored.batch["sequence_scores"].tolist() == [2 + weight, 4 + weight]
    assert scored.meta_info["metrics"]["reward/score/mean"] == 1.0, "the function's own score is reported as it is"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_response_that_the_model_cannot_score_is_left_out(tmp_path, capsys, bad):
    scores = reads_tokens([2.0, bad, 4.0], tmp_path, 0.5)
    model = ModelReward(scores, RewardModelConfig(enable=True, normalize="batch"))
    scored = Scoring(function, OverlongBufferConfig(), 5, model, 0.0)(batch(3, 1, 2))
    assert scored.batch["scored"].tolist() == [True, False, True]
    assert scored.batch["response_mask"].sum(dim=-1).tolist() == [3, 0, 2]
    assert scored.batch["sequence_scores"].tolist() == pytest.approx([-1, torch.nan, 1], nan_ok=True)
    metrics = scored.meta_info["metrics"]
    assert metrics["reward_model/score/mean"] == 3.0 and metrics["reward_model/error_rate"] == 1 / 3
    assert "reward model rm: first error, on sample 1 of the batch (data row 1)" in capsys.readouterr().out
    [kept] = (tmp_path / "reward_failures.jsonl").read_text().splitlines()
    assert f"the reward model gives {bad}; expected a finite number" in json.loads(kept)["reason"]
    with pytest.raises(UserError, match=r"reward model rm gave no score for 1 of 3 .*max_failure_rate=0.25"):
        ModelReward(reads_tokens([2.0, bad, 4.0], tmp_path), RewardModelConfig(enable=True))(batch(3, 1, 2))


def test_normalisation_leaves_out_empty_responses():
    scores, valid = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    assert normalized(scores, valid).tolist() == pytest.approx([-1, 1, 0])
    assert normalized(torch.tensor([2.0, 2.0]), torch.tensor([True, True])).tolist() == [0, 0]
    assert normalized(scores, torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]


@pytest.fixture(scope="module")
def judge(task, tmp_path_factory) -> Path:
    """A random reward model in the policy's vocabulary."""
    return save_random_reward_model(task, tmp_path_factory.mktemp("judge"))


def configured(task, run_dir: Path, judge: Path, **changes) -> PPOConfig:
    keys = {"reward_model__enable": "true", "reward_model__model__path": judge, **changes}
    config, explicit = load_config(PPOConfig, task.ppo(run_dir, **keys))
    check_config(config, explicit)
    return config


def test_a_run_trains_on_the_model_s_score_and_reports_the_function_s(task, judge, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = tmp_path / "run"
    config = configured(
        task,
        run_dir,
        judge,
        reward_model__function_weight=0,
        reward_model__micro_batch_size_per_gpu=5,
        reward_model__normalize="batch",
        algorithm__kl_ctrl__kl_coef=0.01,
        trainer__total_training_steps=2,
    )
    validation = train(config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert row["reward_model/reward/mean"] == pytest.approx(0.0, abs=1e-5)
        assert row["critic/score/mean"] == pytest.approx(0.0, abs=1e-5) and 0 <= row["reward/score/mean"] <= 1
        assert row["reward_model/score/std"] > 0
    assert {"val/score/mean", "val/reward_model/score/mean"} <= set(validation)


def test_the_scores_are_those_of_transformers(task, judge, tmp_path, monkeypatch):
    """Without a function, validation's score is the model's on each whole response, as transformers reads it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = tmp_path / "run"
    config = configured(
        task,
        run_dir,
        judge,
        custom_reward_function__path=None,
        trainer__val_only="true",
        trainer__log_val_generations=24,
    )
    validation = train(config)
    model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    samples = [json.loads(line) for line in (run_dir / "val_samples.jsonl").open()]
    assert len(samples) == 24
    for sample in samples:
        ids = tokenizer(sample["prompt"] + sample["response"], return_tensors="pt").input_ids
        with torch.no_grad():
            # One sequence, no padding: the last token, whatever it is.
            hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
            assert float(model.score(hidden)) == pytest.approx(sample["score"], rel=1e-3, abs=1e-4)
    assert validation["val/score/mean"] == pytest.approx(sum(s["score"] for s in samples) / 24, rel=1e-4)
    assert validation["val/reward_model/score/mean"] == pytest.approx(validation["val/score/mean"], rel=1e-5)


def test_what_cannot_be_meant_is_refused(task, judge, tmp_path):
    with pytest.raises(UserError, match=r"reward_model.weight has no effect without reward_model.enable=true"):
        configured(
            task, tmp_path, judge, reward_model__enable="false", reward_model__weight=1, reward_model__model__path=None
        )
    with pytest.raises(UserError, match=r"function_weight has no effect without a reward function beside"):
        configured(task, tmp_path, judge, custom_reward_function__path=None, reward_model__function_weight=1)
    with pytest.raises(UserError, match=r"reward_model.normalize=std: expected none or batch"):
        configured(task, tmp_path, judge, reward_model__normalize="std")
    with pytest.raises(UserError, match=r"reward_model.model.path is not set"):
        train(configured(task, tmp_path, judge, reward_model__model__path="null"))
    with pytest.raises(UserError, match=r"has 2 labels; give a reward model, which has one"):
        train(configured(task, tmp_path, task.model))
    with pytest.raises(UserError, match=r"reward_model.n_gpus_per_node is not set: with enable_resource_pool=true"):
        configured(task, tmp_path, judge, reward_model__enable_resource_pool="true")
    with pytest.raises(UserError, match=r"n_gpus_per_node has no effect without reward_model.enable_resource_pool"):
        configured(task, tmp_path, judge, reward_model__n_gpus_per_node=1)
    with pytest.raises(UserError, match=r"reward_model.judge.verdict has no effect with reward_model.style=discrimi"):
        configured(task, tmp_path, judge, reward_model__judge__verdict="'(1)'")
