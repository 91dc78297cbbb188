"""A step's numbers."""

import math

import pytest
import torch

from podium.protocol import DataProto
from podium.trainer.ppo.metrics import batch_metrics, forward_metrics, throughput_metrics, update_metrics

NAN = float("nan")


@pytest.fixture
def batch() -> DataProto:
    """Two rows, prompts of 2 and 1, responses of 3 and 1; NaN wherever nothing is valid."""
    return DataProto.from_dict(
        {
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]).bool(),
            "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [3.0, 0.0, 0.0]]),
            "token_level_rewards": torch.tensor([[-0.5, 0.0, 1.0], [3.0, 0.0, 0.0]]),
            "advantages": torch.tensor([[1.0, 2.0, 3.0], [6.0, NAN, NAN]]),
            "returns": torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]]),
            "values": torch.tensor([[1.0, 2.0, 3.0], [2.0, NAN, NAN]]),
            "entropys": torch.tensor([[1.0, 2.0, 3.0], [2.0, NAN, NAN]]),
            "rollout_log_probs": torch.tensor([[-1.0, -1.0, -1.0], [-2.0, NAN, NAN]]),
            "old_log_probs": torch.tensor([[-1.0, -1.0, -1.5], [-2.0, NAN, NAN]]),
        }
    )


def test_sequences_and_tokens(batch):
    metrics = batch_metrics(batch, max_response_length=3)
    assert all(math.isfinite(value) for value in metrics.values())
    spread = {name: [metrics[f"{name}/{end}"] for end in ("mean", "max", "min")] for name in SPREADS}
    assert spread == SPREADS
    assert metrics["response_length/clip_ratio"] == 0.5
    # Residuals 0, 0, 0, 2: unbiased variance 1, of the returns 5/3.
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - 1 / (5 / 3), abs=1e-4)


SPREADS = {
    "critic/score": [2.0, 3.0, 1.0],
    "critic/rewards": [1.75, 3.0, 0.5],
    "critic/advantages": [3.0, 6.0, 1.0],
    "critic/returns": [2.5, 4.0, 1.0],
    "critic/values": [2.0, 3.0, 1.0],
    "response_length": [2.0, 3.0, 1.0],
    "prompt_length": [1.5, 2.0, 1.0],
}


def test_without_a_critic_there_are_no_values(batch):
    metrics = batch_metrics(batch.select(batch_keys=[k for k in batch.batch.keys() if k != "values"]), 3)  # noqa: SIM118
    assert not [name for name in metrics if name.startswith(("critic/values", "critic/vf"))]


def test_a_batch_without_valid_tokens_has_no_token_metrics(batch):
    batch.batch["response_mask"] = torch.zeros(2, 3, dtype=torch.bool)
    del batch.batch["values"]
    metrics = batch_metrics(batch, 3)
    assert "critic/advantages/mean" not in metrics and metrics["response_length/max"] == 0


def test_the_gap_between_the_engines(batch):
    metrics = forward_metrics(batch)
    gap = math.exp(-1.0) - math.exp(-1.5)
    assert metrics["actor/old_entropy"] == 2.0
    assert metrics["training/rollout_log_probs_diff_mean"] == 0.125
    assert metrics["training/rollout_log_probs_diff_max"] == 0.5
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(gap / 4)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(gap)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(gap * math.sqrt(3) / 4)


def test_the_gap_to_older_weights_has_another_name(batch):
    fresh, stale = forward_metrics(batch), forward_metrics(batch, weight_age=1)
    assert stale == {name.replace("training/rollout", "training/stale_rollout"): value for name, value in fresh.items()}
    assert not set(stale) & {name for name in fresh if "rollout" in name}


def test_no_forward_no_gap(batch):
    del batch.batch["entropys"]
    assert forward_metrics(batch) == {}


def test_several_updates_as_one():
    updates = [{"actor/pg_loss": 1.0, "actor/ratio_dev_max": 0.1, "grad_norm": 2.0}]
    updates.append({"actor/pg_loss": 3.0, "actor/ratio_dev_max": 0.05, "grad_norm": 4.0})
    assert update_metrics("actor", updates) == {
        "actor/pg_loss": 2.0,
        "actor/ratio_dev_max": 0.1,
        "actor/grad_norm": 3.0,
    }


def test_throughput_counts_prompts_and_responses(batch):
    metrics = throughput_metrics(batch, seconds=0.5, ranks=2)
    assert metrics == {"perf/total_num_tokens": 7, "perf/time_per_step": 0.5, "perf/throughput": 7.0}
