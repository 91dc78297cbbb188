import pytest
import torch

from podium.protocol import DataProto
from podium.trainer.config.reward import OverlongBufferConfig
from podium.trainer.ppo.scoring import Scoring


def reward(batch: DataProto) -> DataProto:
    """1 on the last token of each response."""
    mask = batch.batch["response_mask"].long()
    last = torch.nn.functional.one_hot((mask.sum(-1) - 1).clamp(min=0), mask.shape[1]) * mask
    return DataProto.from_dict({"token_level_scores": last.float()}, meta_info={"metrics": {"reward/score/mean": 1.0}})


def batch(*lengths: int) -> DataProto:
    return DataProto.from_dict({"response_mask": torch.arange(10) < torch.tensor(lengths)[:, None]})


def test_without_a_buffer_scores_stay():
    scored = Scoring(reward, OverlongBufferConfig(), 10)(batch(10, 3))
    assert scored.batch["token_level_scores"].sum(-1).tolist() == scored.batch["sequence_scores"].tolist() == [1, 1]
    assert scored.meta_info["metrics"] == {"reward/score/mean": 1.0}


def test_the_penalty_lies_on_the_last_token_and_leaves_the_function_s_score_alone():
    scored = Scoring(reward, OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0), 10)(batch(10, 7, 6, 0))
    scores = scored.batch["token_level_scores"]
    assert scores[0, 9] == pytest.approx(1 - 2) and scores[1, 6] == pytest.approx(1 - 0.5) and scores[2, 5] == 1
    assert scored.batch["sequence_scores"].tolist() == [1, 1, 1, 0] and scores[3].eq(0).all()
    metrics = scored.meta_info["metrics"]
    assert metrics["reward/overlong/mean"] == 0.5 and metrics["reward/overlong_penalty/mean"] == pytest.approx(-2.5 / 4)
