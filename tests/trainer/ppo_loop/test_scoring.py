from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.protocol import DataProto
from podium.trainer.config.algorithm import AlgorithmConfig
from podium.trainer.config.reward import OverlongBufferConfig
from podium.trainer.ppo.advantages import AdvantageEstimator
from podium.trainer.ppo.estimator import Estimator
from podium.trainer.ppo.scoring import Scoring, advantages_of_scored


def reward(batch: DataProto, outcomes: None = None) -> DataProto:
    """1 on the last token of each response."""
    mask = batch.batch["response_mask"].long()
    last = torch.nn.functional.one_hot((mask.sum(-1) - 1).clamp(min=0), mask.shape[1]) * mask
    columns = {"token_level_scores": last.float(), "scored": torch.ones(len(mask), dtype=torch.bool)}
    return DataProto.from_dict(columns, meta_info={"metrics": {"reward/score/mean": 1.0}})


def batch(*lengths: int) -> DataProto:
    return DataProto.from_dict({"response_mask": torch.arange(10) < torch.tensor(lengths)[:, None]})


def test_without_a_buffer_scores_stay():
    scored = Scoring(reward, OverlongBufferConfig(), 10)(batch(10, 3))
    assert scored.batch["token_level_scores"].sum(-1).tolist() == scored.batch["sequence_scores"].tolist() == [1, 1]
    assert scored.meta_info["metrics"] == {"reward/score/mean": 1.0, "reward/short_groups": 0}


def test_the_penalty_lies_on_the_last_token_and_leaves_the_function_s_score_alone():
    scored = Scoring(reward, OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0), 10)(batch(10, 7, 6, 0))
    scores = scored.batch["token_level_scores"]
    assert scores[0, 9] == pytest.approx(1 - 2) and scores[1, 6] == pytest.approx(1 - 0.5) and scores[2, 5] == 1
    assert scored.batch["sequence_scores"].tolist() == [1, 1, 1, 0] and scores[3].eq(0).all()
    metrics = scored.meta_info["metrics"]
    assert metrics["reward/overlong/mean"] == 0.5 and metrics["reward/overlong_penalty/mean"] == pytest.approx(-2.5 / 4)


class FailsOn:
    """A reward manager whose `rows` have no score."""

    def __init__(self, *rows):
        self._rows = list(rows)

    def __call__(self, data: DataProto, outcomes: None = None) -> DataProto:
        scored = reward(data)
        scored.batch["scored"][self._rows] = False
        return scored


def test_rows_without_a_score_take_no_part():
    data = batch(10, 3, 5, 7)
    data.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0)
    scored = Scoring(FailsOn(0), buffer, 10)(data)
    assert scored.batch["response_mask"].sum(-1).tolist() == [0, 3, 5, 7]
    assert scored.batch["scored"].tolist() == [False, True, True, True]
    assert scored.batch["sequence_scores"].isnan().tolist() == [True, False, False, False]
    metrics = scored.meta_info["metrics"]
    assert metrics["reward/short_groups"] == 1 and metrics["reward/overlong/mean"] == pytest.approx(1 / 3)


def algorithm(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, gdpo_reward_keys=["first", "second"])


def random_batch(seed: int, groups: int, n: int, width: int) -> DataProto:
    """With everything that an estimator may read; some responses are empty."""
    generator = torch.Generator().manual_seed(seed)
    rows = groups * n
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    uniform = {
        name: torch.rand(rows, width, generator=generator)
        for name in ("values", "old_log_probs", "rollout_log_probs", "sum_pi_squared", "token_level_rewards")
    }
    columns = {"response_mask": torch.arange(width) < lengths, "scored": torch.rand(rows, generator=generator) < 0.6}
    columns["scored"][0] = True
    objects = {
        name: np.array(torch.rand(rows, generator=generator).tolist(), dtype=object) for name in ("first", "second")
    }
    objects["uid"] = np.array([str(row // n) for row in range(rows)], dtype=object)
    baselines = torch.rand(rows, generator=generator)
    return DataProto.from_dict({**columns, **uniform, "reward_baselines": baselines}, objects)


@pytest.mark.parametrize("name", [*AdvantageEstimator, "plug-in"])
@given(seed=st.integers(0, 2**32), groups=st.integers(1, 4), n=st.integers(1, 5), width=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_advantages_are_those_of_a_batch_without_the_failed_rows(name, seed, groups, n, width):
    whole = random_batch(seed, groups, n, width)
    scored = whole.batch["scored"]
    estimator = Estimator("plug-in", careless, frozenset(["token_level_rewards", "index"]))
    if name != "plug-in":
        estimator = Estimator.named(name)
    small = whole.select_idxs(scored)
    expected = advantages_of_scored(estimator, small, small.batch["token_level_rewards"], algorithm(name))
    # What a failed row holds must not matter, and neither must whether anything there is masked.
    for column in ("token_level_rewards", "values", "old_log_probs", "rollout_log_probs", "sum_pi_squared"):
        whole.batch[column][~scored] = torch.nan
    for key in ("first", "second"):
        whole.non_tensor_batch[key][~scored.numpy()] = None
    got = advantages_of_scored(estimator, whole, whole.batch["token_level_rewards"], algorithm(name))
    for column in ("advantages", "returns"):
        assert torch.equal(got[column][scored], expected[column])
        assert (got[column][~scored] == 0).all()
    alone = [uid for uid, count in Counter(small.non_tensor_batch["uid"]).items() if count == 1]
    if name in ("grpo", "rloo", "opo", "gpg", "grpo_passk", "optimal_token_baseline", "plug-in"):
        rows = torch.tensor([uid in alone for uid in small.non_tensor_batch["uid"]])
        assert (expected["advantages"][rows] == 0).all()


def careless(token_level_rewards, index):
    """Knows of no masks, as a user's first estimator."""
    scores = token_level_rewards.sum(-1)
    means = torch.stack([scores[torch.from_numpy(index == uid)].mean() for uid in index])
    advantages = (scores - means)[:, None].expand_as(token_level_rewards)
    return advantages, advantages
