"""What is found out about rewards before anything starts."""

import json

import pytest

from podium.trainer.config import PPOConfig
from podium.trainer.ppo.preflight import check_rewards
from podium.utils.dataset import PromptDataset
from podium.utils.errors import UserError
from podium.workers.reward.functions import default_compute_score
from podium.workers.reward.manager import RewardManager
from tests.utils.small_tokenizers import char_tokenizer
from tests.workers.reward.direct import DirectScorer

TOKENIZER = char_tokenizer()


@pytest.fixture
def dataset(tmp_path):
    def make(*rows, name="rows.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps({"prompt": "21=", **row}) + "\n" for row in rows))
        return PromptDataset(str(file), TOKENIZER, max_prompt_length=4)

    return make


def row(source, truth="12"):
    return {"data_source": source, "reward_model": {"ground_truth": truth}}


def manager(fn):
    return RewardManager(DirectScorer(fn), TOKENIZER)


def test_one_row_of_each_data_source_is_scored(dataset):
    seen = []

    def fn(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, ground_truth))
        return 1.0

    train, val = dataset(row("a", "1"), row("b", "2"), row("a", "3")), dataset(row("c", "4"), name="val.jsonl")
    check_rewards(PPOConfig(), manager(fn), [train, val])
    assert seen == [("a", "1"), ("b", "2"), ("c", "4")]


def test_the_row_that_does_not_work_is_named_by_its_file(dataset):
    with pytest.raises(UserError, match=r"rows.jsonl line 2, data_source 'mine': no built-in reward"):
        check_rewards(PPOConfig(), manager(default_compute_score), [dataset(row("exact_match"), row("mine"))])
    with pytest.raises(UserError, match=r"val.jsonl line 1.*no reward_model.ground_truth"):
        rows = dataset({"data_source": "exact_match", "reward_model": None}, name="val.jsonl")
        check_rewards(PPOConfig(), manager(default_compute_score), [rows])


def test_columns_that_are_not_there_are_told(dataset, capsys):
    check_rewards(PPOConfig(), manager(lambda **_: 1.0), [dataset({}, {})])
    out = capsys.readouterr().out
    assert "rows.jsonl line 1: no column 'data_source'" in out and "no column 'reward_model'" in out
    with pytest.raises(UserError, match=r"rows.jsonl line 1, data_source 'unknown': no built-in reward"):
        check_rewards(PPOConfig(), manager(default_compute_score), [dataset({})])


def test_keys_that_methods_read_must_come_back(dataset):
    config = PPOConfig()
    config.algorithm.adv_estimator, config.algorithm.gdpo_reward_keys = "gdpo", ["form"]
    with pytest.raises(UserError, match="gdpo_reward_keys"):
        check_rewards(config, manager(lambda **_: {"score": 1, "from": 1}), [dataset(row("a"))])
    check_rewards(config, manager(lambda **_: {"score": 1, "form": 1}), [dataset(row("a"))])
