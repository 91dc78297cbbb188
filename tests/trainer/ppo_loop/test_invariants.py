"""What must hold in every step."""

import numpy as np
import pytest
import torch

from podium.protocol import DataProto
from podium.trainer.config import PPOConfig
from podium.trainer.ppo.invariants import Invariants
from podium.utils.errors import UserError

GOOD = {"training/first_ratio_dev_max": 1e-6, "training/rollout_log_probs_diff_mean": 1e-6, "training/weight_age": 0}
EOS = 2


def batch(responses: list[list[int]], uids: str) -> DataProto:
    ids = torch.tensor(responses)
    return DataProto.from_dict(
        {"responses": ids, "response_mask": ids > 0},
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
    assert Invariants(config())(1, WHOLE, GOOD) == {
        "invariants/incomplete_groups": 0,
        "invariants/tokens_after_end": 0,
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
    ],
)
def test_each_rule(data, changes, name, capsys):
    warns = Invariants(config())
    for step in (1, 2):
        assert warns(step, data, GOOD | changes)["invariants/violated"] == 1
    said = capsys.readouterr().err
    assert said.count("warning: step 1: " + name) == 1 and "step 2" not in said
    with pytest.raises(UserError, match=name):
        Invariants(config(invariants="stop"))(1, data, GOOD | changes)


def test_older_weights_on_purpose_may_differ():
    metrics = GOOD | {"training/rollout_log_probs_diff_mean": 0.5, "training/weight_age": 1}
    assert Invariants(config(invariants="stop"))(1, WHOLE, metrics)["invariants/violated"] == 0
