"""Validation with a real rollout."""

import dataclasses
import re

import pytest

from podium.trainer.config import load_config
from podium.trainer.ppo.validation import Validator
from podium.workers.reward.manager import RewardManager
from tests.small_task import SmallTask
from tests.workers.reward.direct import DirectScorer


def validate(parts, task: SmallTask, **changes):
    config, _ = load_config(type(parts.config), task.ppo(task.model, **changes))
    return Validator(config, parts.val, parts.groups["rollout"], parts.reward, parts.tokenizer)(0)


KWARGS = "actor_rollout_ref__rollout__val_kwargs__"


def test_greedy_validation_is_one_number_however_it_is_cut(parts, task):
    metrics, samples = validate(parts, task)
    assert metrics["val/score/mean"] == metrics["val/podium/sort6/score/mean@1"]
    assert 0 <= metrics["val/score/mean"] <= 1 and 1 <= metrics["val/response_length/mean"] <= 7
    assert validate(parts, task, data__val_batch_size=7) == (metrics, samples)
    assert validate(parts, task, trainer__seed=9) == (metrics, samples)


def test_samples_are_the_first_rows_with_their_scores(parts, task):
    metrics, samples = validate(parts, task, trainer__log_val_generations=5)
    assert len(samples) == 5
    for row, (prompt, response, truth, score) in enumerate(samples):
        assert prompt == parts.val[row]["raw_prompt"] and truth == "".join(sorted(prompt[:6]))
        digits = sum(c.isdigit() for c in response.replace("<eos>", ""))
        assert score == pytest.approx(min(6, digits) / 6)
    everything = validate(parts, task, trainer__log_val_generations=100)[1]
    assert len(everything) == len(parts.val)
    assert sum(row[3] for row in everything) / len(everything) == pytest.approx(metrics["val/score/mean"])
    assert validate(parts, task, trainer__log_val_generations=0)[1] == []


def test_several_sampled_responses_report_their_best(parts, task):
    sampled = {f"{KWARGS}temperature": 1.0, f"{KWARGS}n": 4, "trainer__log_val_generations": 200}
    metrics, samples = validate(parts, task, **sampled)
    scores = [row[3] for row in samples]
    groups = [scores[i : i + 4] for i in range(0, len(scores), 4)]
    assert len(groups) == len(parts.val) and any(len(set(group)) > 1 for group in groups)
    assert metrics["val/podium/sort6/score/mean@4"] == pytest.approx(sum(scores) / len(scores))
    assert metrics["val/podium/sort6/score/best@4"] == pytest.approx(sum(map(max, groups)) / len(groups))


def test_each_data_source_has_its_own_number(parts, task):
    class TwoSources:
        def __len__(self) -> int:
            return len(parts.val)

        def __getitem__(self, item: int) -> dict:
            return {**parts.val[item], "data_source": f"source {item % 2}"}

    metrics, samples = validate(dataclasses.replace(parts, val=TwoSources()), task, trainer__log_val_generations=100)
    for parity in (0, 1):
        scores = [row[3] for row in samples[parity::2]]
        assert metrics[f"val/source {parity}/score/mean@1"] == pytest.approx(sum(scores) / len(scores))


def test_numbers_beside_the_score_are_metrics_too(parts, task):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 1.0, "length": len(solution_str), "text": solution_str}

    reward = RewardManager(DirectScorer(compute_score), parts.tokenizer)
    metrics, samples = validate(
        dataclasses.replace(parts, reward=reward), task, data__val_batch_size=7, trainer__log_val_generations=100
    )
    lengths = [len(re.sub(r"<\w+>", "", row[1])) for row in samples]  # without special tokens
    assert metrics["val/length/mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert "val/text/mean" not in metrics
