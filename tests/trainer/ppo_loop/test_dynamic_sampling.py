"""Dynamic sampling over a scripted source: which rows come through, and what is said about the others."""

import numpy as np
import pytest
import torch

from podium.protocol import DataProto
from podium.trainer.ppo.dynamic_sampling import DynamicSampling, judged_by
from podium.utils.errors import UserError

N = 2


class Script:
    """Batches of three prompts with two responses each, scored as the script says."""

    def __init__(self, *batches: list[float]):
        self.min_version, self.epoch, self._batches, self._given = 0, 0, list(batches), 0

    def __next__(self) -> DataProto:
        scores = torch.tensor(self._batches[self._given])
        prompts = len(scores) // N
        first = self._given * prompts
        self._given += 1
        uid = np.repeat([str(first + i) for i in range(prompts)], N).astype(object)
        mask = torch.ones(len(scores), 2, dtype=torch.bool)
        mask[scores < 0] = False
        tensors = {
            "response_mask": mask,
            "sequence_scores": scores,
            "token_level_scores": torch.stack([torch.zeros_like(scores), scores - torch.arange(len(scores))], dim=1),
        }
        objects = {"uid": uid, "acc": np.array([float(s > 0.5) for s in scores], dtype=object)}
        if self._given == 2:
            objects["note"] = np.array(["second"] * len(scores), dtype=object)
        metrics = {"reward/score/mean": float(scores.mean()), "reward/score/max": float(scores.max())}
        return DataProto.from_dict(tensors, objects, {"metrics": metrics})

    def state_dict(self):
        return {"given": self._given}

    def load_state_dict(self, state):
        self._given = state["given"]


SIGNAL, NONE = [0.0, 1.0], [1.0, 1.0]


def test_prompts_without_signal_are_replaced_and_the_surplus_dropped():
    script = Script([*SIGNAL, *NONE, *NONE], [*NONE, *NONE, *NONE], [*SIGNAL, *SIGNAL, *SIGNAL])
    batch = next(DynamicSampling(script, "score", 3, 5))
    assert batch.non_tensor_batch["uid"].tolist() == ["0", "0", "6", "6", "7", "7"]
    assert batch.batch["sequence_scores"].tolist() == [0, 1] * 3
    metrics = batch.meta_info["metrics"]
    assert metrics["filter_groups/num_gen_batches"] == 3 and metrics["filter_groups/surplus"] == 1
    assert metrics["filter_groups/with_signal"] == pytest.approx(4 / 9)
    # Of all that was generated, so that filtering does not flatter the score.
    assert metrics["reward/score/mean"] == pytest.approx((5 / 6 + 1 + 1 / 2) / 3) and metrics["reward/score/max"] == 1
    # A key that the reward function returned for one batch only.
    assert batch.non_tensor_batch["note"].tolist() == [None] * 6


def test_a_full_batch_comes_as_it_is():
    batch = next(DynamicSampling(Script([*SIGNAL, *SIGNAL, *SIGNAL]), "score", 3, 1))
    assert len(batch) == 6 and batch.meta_info["metrics"]["filter_groups/num_gen_batches"] == 1


def test_it_stops_at_the_limit():
    source = DynamicSampling(Script(*[[*SIGNAL, *NONE, *NONE]] * 3), "score", 3, 2)
    with pytest.raises(UserError, match="only 2 of 3 prompts got differing rewards in 2 batches"):
        next(source)


def test_an_empty_response_is_no_difference():
    batch = next(DynamicSampling(Script([*SIGNAL, -1.0, 1.0], [*SIGNAL, *NONE]), "score", 2, 3))
    assert batch.non_tensor_batch["uid"].tolist() == ["0", "0", "2", "2"]


def test_the_metric_may_be_a_key_of_the_reward_function():
    batch = next(Script([0.0, 0.4, 0.6, 1.0, 0.4, 0.6]))
    assert judged_by(batch, "acc").tolist() == [0, 0, 1, 1, 0, 1]
    assert judged_by(batch, "seq_reward").tolist() == pytest.approx([0, -0.6, -1.4, -2, -3.6, -4.4])
    batch.non_tensor_batch["acc"][0] = None
    assert judged_by(batch, "acc").isnan().tolist() == [True, *[False] * 5]
    with pytest.raises(UserError, match="did you mean 'acc'"):
        judged_by(batch, "ac")


def test_position_and_weight_version_are_the_sources():
    script = Script([*SIGNAL], [*SIGNAL])
    source = DynamicSampling(script, "score", 1, 1)
    source.min_version = 7
    assert script.min_version == source.min_version == 7
    next(source)
    state = source.state_dict()
    next(source)
    source.load_state_dict(state)
    assert next(source).non_tensor_batch["uid"].tolist() == ["1", "1"]
