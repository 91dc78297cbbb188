"""What must hold in every step."""

import numpy as np
import pytest
import torch

from podium.protocol import DataProto
from podium.trainer.config import PPOConfig
from podium.trainer.ppo.invariants import Invariants, advantage_mean
from podium.utils.errors import UserError

GOOD = {
    "training/first_ratio_dev_max": 1e-6,
    "training/rollout_log_probs_diff_mean": 1e-6,
    "training/weight_age": 0,
    "training/weight_version": 7,
    "reward/failure_rate": 0.1,
}
EOS = 2


def batch(responses: list[list[int]], uids: str, versions: tuple[int, int] = (7, 7)) -> DataProto:
    ids = torch.tensor(responses)
    columns = {
        "responses": ids,
        "response_mask": ids > 0,
        "advantages": torch.linspace(-1, 1, len(ids))[:, None].expand(ids.shape).clone(),
        "weight_versions": torch.tensor([[7, 7]] * (len(ids) - 1) + [list(versions)]),
    }
    return DataProto.from_dict(
        columns,
        {"uid": np.array(list(uids), dtype=object)},
        {"eos_token_id": [EOS, 9]},
    )


def config(**changes: str) -> PPOConfig:
    made = PPOConfig()
    made.actor_rollout_ref.rollout.n, made.actor_rollout_ref.rollout.dtype = 2, "float32"
    for name, value in changes.items():
        setattr(made.trainer, name, value)
    return made


WHOLE = batch([[5, EOS, 0], [5, 6, 7], [9, 0, 0], [5, 5, EOS]], "aabb")


def test_a_step_in_order():
    assert Invariants(config(), 4)(1, WHOLE, GOOD) == {
        "invariants/incomplete_groups": 0,
        "invariants/tokens_after_end": 0,
        "invariants/other_weight_versions": 0,
        "invariants/advantage_mean_max": 0,
        "invariants/violated": 0,
    }


@pytest.mark.parametrize(
    ("data", "changes", "name"),
    [
        (batch([[5, EOS, 0]] * 3, "aab"), {}, "invariants/incomplete_groups is 1"),
        (batch([[5, EOS, 7], [5, 9, EOS]], "aa"), {}, "invariants/tokens_after_end is 2"),
        (WHOLE, {"training/first_ratio_dev_max": 0.3}, "training/first_ratio_dev_max is 0.3, the limit is 0.01"),
        (WHOLE, {"training/first_ratio_dev_max": float("nan")}, "training/first_ratio_dev_max is nan"),
        (WHOLE, {"training/rollout_log_probs_diff_mean": 0.5}, "training/rollout_log_probs_diff_mean is 0.5"),
        (WHOLE, {"reward/failure_rate": 0.2}, "reward/failure_rate is 0.2, the limit is 0.125"),
        (WHOLE, {"reward_model/failure_rate": 0.2}, "reward_model/failure_rate is 0.2, the limit is 0.125"),
        (WHOLE, {"training/weight_version": 8}, "invariants/other_weight_versions is 4"),
        (batch([[5, EOS]] * 4, "aabb", (6, 7)), {}, "invariants/other_weight_versions is 1"),
    ],
)
def test_each_rule(data, changes, name, capsys):
    warns = Invariants(config(), 4)
    for step in (1, 2):
        assert warns(step, data, GOOD | changes)["invariants/violated"] == 1
    said = capsys.readouterr().err
    assert said.count("warning: step 1: " + name) == 1 and "step 2" not in said
    with pytest.raises(UserError, match=name):
        Invariants(config(invariants="stop"), 4)(1, data, GOOD | changes)


def test_older_weights_on_purpose_may_differ():
    metrics = GOOD | {"training/rollout_log_probs_diff_mean": 0.5, "training/weight_age": 1}
    assert Invariants(config(invariants="stop"), 4)(1, WHOLE, metrics)["invariants/violated"] == 0


def test_a_mini_batch_that_is_no_sample_of_the_batch_is_told():
    """Rows sorted by advantage, in mini-batches of 64 of 256; in any random order they are within the limit."""
    advantages = torch.linspace(-1, 1, 256)[:, None].expand(256, 3).clone()
    ids = torch.full((256, 3), 5)
    uids = np.array([str(i // 2) for i in range(256)], dtype=object)
    columns = {"responses": ids, "response_mask": ids > 0, "weight_versions": torch.full((256, 2), 7)}
    data = DataProto.from_dict(columns | {"advantages": advantages}, {"uid": uids}, {"eos_token_id": [EOS]})
    assert advantage_mean(data, 64) > 10
    with pytest.raises(UserError, match="invariants/advantage_mean_max"):
        Invariants(config(invariants="stop"), 64)(1, data, GOOD)
    poisoned = advantages.clone()
    poisoned[:, 1:] = torch.nan
    columns["response_mask"] = torch.tensor([[True, False, False]]).expand(256, 3)
    for seed in range(20):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(seed))
        assert advantage_mean(DataProto.from_dict(columns | {"advantages": poisoned[order]}), 64) < 5
