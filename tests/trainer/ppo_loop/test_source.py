"""Batches from prompts, with a real rollout."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.protocol import DataProto, WorkerError
from podium.trainer.ppo.dynamic_sampling import DynamicSampling
from podium.trainer.ppo.scoring import Scoring
from podium.trainer.ppo.source import SyncSource, generate, prompt_batch, response_seeds
from podium.utils.dataset import EpochLoader
from podium.utils.timing import PhaseTimer

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def source(parts, n=2, seed=3, timer=None, loader=None, **options) -> SyncSource:
    return SyncSource(
        parts.train,
        loader or EpochLoader(len(parts.train), 8, seed=1),
        parts.groups["rollout"],
        Scoring(parts.reward, parts.config.reward_model.overlong_buffer, 7),
        timer or PhaseTimer(),
        n=n,
        sampling=SAMPLING,
        seed=seed,
        pad_token_id=parts.tokenizer.pad_token_id,
        max_prompt_length=7,
        **options,
    )


def same(left: DataProto, right: DataProto) -> bool:
    return all(torch.equal(left.batch[name], right.batch[name]) for name in left.batch.keys())  # noqa: SIM118


@given(st.integers(0, 2**40), st.integers(0, 2**33), st.integers(1, 50), st.integers(1, 50))
def test_seeds_depend_on_run_batch_and_row_alone(run, stream, few, more):
    seeds = response_seeds(run, stream, few)
    assert seeds.dtype == torch.int64 and seeds.shape == (few,)
    assert int(seeds.min()) >= 0 and int(seeds.max()) < 2**62
    assert torch.equal(seeds, response_seeds(run, stream, few + more)[:few])
    assert len(set(response_seeds(run, stream, few + more).tolist())) == few + more
    assert not set(seeds.tolist()) & set(response_seeds(run, stream + 1, few).tolist())
    assert not set(seeds.tolist()) & set(response_seeds(run + 1, stream, few).tolist())


def test_prompts_are_repeated_side_by_side(parts):
    rows = [parts.train[i] for i in range(3)]
    batch = prompt_batch(rows, parts.tokenizer.pad_token_id, 9, n=2, first_uid=10)
    assert batch.batch["prompts"].shape == (6, 9)
    assert batch.non_tensor_batch["uid"].tolist() == ["10", "10", "11", "11", "12", "12"]
    assert batch.non_tensor_batch["raw_prompt"].tolist() == [row["raw_prompt"] for row in rows for _ in range(2)]
    # Left-padded by two.
    assert not batch.batch["prompt_mask"][:, :2].any() and batch.batch["prompt_mask"][:, 2:].all()


def test_a_batch_is_answered_and_scored(parts):
    timer = PhaseTimer()
    ours = source(parts, timer=timer)
    batch = next(ours)
    assert len(batch) == 16 and ours.epoch == 0
    assert {"timing_s/gen", "timing_s/reward"} <= timer.pop().keys()
    tensors = batch.batch
    assert tensors["responses"].shape == tensors["response_mask"].shape == (16, 7)
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], dim=1))
    for row in range(16):
        text = parts.tokenizer.decode(
            tensors["responses"][row][tensors["response_mask"][row]], skip_special_tokens=True
        )
        digits = min(6, sum(c.isdigit() for c in text)) / 6
        assert float(tensors["token_level_scores"][row].sum()) == pytest.approx(digits)
    # Two samples of one prompt have seeds of their own.
    assert not torch.equal(tensors["responses"][0], tensors["responses"][1])
    assert batch.meta_info["metrics"]["reward/score/mean"] == pytest.approx(
        float(tensors["token_level_scores"].sum(dim=1).mean())
    )


def test_batches_follow_the_seed_and_a_saved_position(parts):
    ours, theirs, other = source(parts), source(parts), source(parts, seed=4)
    first = next(ours)
    assert same(first, next(theirs))
    assert torch.equal(first.batch["prompts"], next(other).batch["prompts"])
    resumed = source(parts)
    resumed.load_state_dict(ours.state_dict())
    second = next(ours)
    assert same(second, next(resumed))
    assert not set(first.non_tensor_batch["uid"]) & set(second.non_tensor_batch["uid"])
    assert not torch.equal(first.batch["prompts"], second.batch["prompts"])


def test_epochs_are_counted(parts):
    ours = source(parts, n=1)
    ours._loader = EpochLoader(16, 8, seed=1)
    assert [next(ours) and ours.epoch for _ in range(4)] == [0, 0, 1, 1]


def test_what_else_is_in_the_batch_does_not_matter(parts):
    rows = [parts.train[i] for i in range(6)]
    rollout, seeds = parts.groups["rollout"], response_seeds(1, 2, 6)
    whole = generate(rollout, prompt_batch(rows, 0, 7, 1), SAMPLING, seeds, 0)
    part = generate(rollout, prompt_batch(rows[3:], 0, 7, 1), SAMPLING, seeds[3:], 0)
    assert torch.equal(whole.batch["responses"][3:], part.batch["responses"])


def test_older_weights_than_asked_for_are_refused(parts):
    ours = source(parts)
    ours.min_version = 1
    with pytest.raises(WorkerError, match="weights of version 1 or newer, the engine holds 0"):
        next(ours)


def test_the_callers_prompts_stay_as_they_were(parts):
    prompts = prompt_batch([parts.train[0]], 0, 7, 1)
    before = set(prompts.batch.keys())
    generate(parts.groups["rollout"], prompts, SAMPLING, response_seeds(0, 0, 1), 0)
    assert set(prompts.batch.keys()) == before and not prompts.meta_info


def test_a_greedy_baseline_is_shared_by_a_prompts_rows(parts):
    batch = next(source(parts, n=2, greedy_baseline=True))
    baselines = batch.batch["reward_baselines"]
    assert baselines.shape == (16,) and torch.equal(baselines[::2], baselines[1::2])
    first = prompt_batch([parts.train[int(i)] for i in EpochLoader(len(parts.train), 8, seed=1).order(0)[:8]], 0, 7, 1)
    greedy = generate(parts.groups["rollout"], first, {**SAMPLING, "temperature": 0.0}, response_seeds(9, 9, 8), 0)
    scores = parts.reward(greedy).batch["token_level_scores"].sum(dim=1)
    assert np.allclose(baselines[::2], scores)


def test_responses_scored_as_they_finish_are_the_same_batch(parts):
    plain, streamed = source(parts), source(parts, steps_at_once=2)
    for _ in range(2):
        one, two = next(plain), next(streamed)
        assert same(one, two) and set(one.batch.keys()) == set(two.batch.keys())
        assert {name: column.tolist() for name, column in one.non_tensor_batch.items()} == {
            name: column.tolist() for name, column in two.non_tensor_batch.items()
        }
        assert one.meta_info == two.meta_info


@pytest.mark.parametrize("steps", [None, 2])
def test_the_order_hears_of_every_batch_that_was_scored(parts, steps):
    """Those that dynamic sampling drops too; scored as they finish, or all together."""
    heard = []

    class Curriculum(EpochLoader):
        def update(self, batch):
            heard.append((batch.non_tensor_batch["index"].tolist(), batch.batch["sequence_scores"].tolist()))

    ours = source(parts, loader=Curriculum(len(parts.train), 8, seed=1), steps_at_once=steps)
    batch = next(DynamicSampling(ours, "score", groups=10, max_num_gen_batches=8))
    batches = int(batch.meta_info["metrics"]["filter_groups/num_gen_batches"])
    assert batches > 1 and len(heard) == batches
    drawn = [list(rows) for _, rows in zip(range(batches), EpochLoader(len(parts.train), 8, seed=1), strict=False)]
    for (rows, scores), (_, expected) in zip(heard, drawn, strict=True):
        assert rows == np.repeat(expected, 2).tolist() and all(0 <= score <= 1 for score in scores)
