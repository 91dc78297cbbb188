"""Checkpoints of the Megatron engine beyond reloading in another layout: no code, no waiting, random streams."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from podium.protocol import Backend, ClassWithInitArgs, DataProto, ResourcePool, WorkerError, WorkerGroup
from podium.trainer.config.shared import MegatronConfig
from podium.utils.errors import UserError
from tests.models.tiny import ragged_batch, save_tiny
from tests.workers.conftest import ENV
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.megatron_hosts import MegatronHost

TP2 = MegatronConfig(tensor_model_parallel_size=2)


@pytest.fixture(scope="module")
def group(local_backend: Backend) -> Iterator[WorkerGroup]:
    spec = ClassWithInitArgs(MegatronHost)
    group = local_backend.start_group(ResourcePool([2]), spec, env=ENV, timeout_s=120)
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama_tied", tmp_path_factory.mktemp("llama"))


def batch(seed: int) -> DataProto:
    return DataProto.from_dict(dict(ragged_batch(8, seed=seed)))


def test_a_snapshot_is_of_the_moment_it_was_taken(group: WorkerGroup, model: str, tmp_path: Path):
    """Written after another step, it holds what there was before it; and nothing that runs when it is read."""
    group.build(model, TP2)
    group.train(batch(0), weighted_log_probs, 4)
    weights, state = group.weights()[0], group.optimizer_state()
    group.take_snapshot()
    metrics = group.train(batch(1), weighted_log_probs, 4)
    after = group.weights()[0]
    group.write_snapshot(str(tmp_path))
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json"}

    group.build(model, TP2)
    group.load(str(tmp_path))
    torch.testing.assert_close(group.weights()[0], weights, rtol=0, atol=0)
    for loaded, saved in zip(group.optimizer_state(), state, strict=True):  # but for the rate, which is the next step's
        torch.testing.assert_close([*loaded[:2], loaded[3]], [*saved[:2], saved[3]], rtol=0, atol=0)
    assert group.train(batch(1), weighted_log_probs, 4) == metrics
    torch.testing.assert_close(group.weights()[0], after, rtol=0, atol=0)


def test_the_random_streams_of_each_rank_go_on(group: WorkerGroup, model: str):
    group.build(model, TP2)
    group.draw()
    states = group.random_state()
    assert states[0]["streams"] != states[1]["streams"]
    group.draw()
    later = group.random_state()
    group.build(model, TP2)
    group.set_random_state(states)
    assert group.random_state() == states
    group.draw()
    assert group.random_state() == later != states


@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_nan_keeps_all_from_saving(group: WorkerGroup, model: str, tmp_path: Path, rank: int):
    """No rank waits for the one that does not write."""
    group.build(model, TP2)
    group.spoil(rank)
    with pytest.raises(WorkerError, match=rf"rank {rank} could not write .*1 of the \d+ numbers of .* are not finite"):
        group.save(str(tmp_path))
    group.build(model, TP2)
    group.save(str(tmp_path))


def test_a_checkpoint_of_another_model_is_refused(group: WorkerGroup, model: str, tmp_path: Path):
    group.build(model, TP2)
    group.save(str(tmp_path / "saved"))
    other = save_tiny("llama_tied", tmp_path / "other", num_hidden_layers=5)
    group.build(other, TP2)
    with pytest.raises(UserError, match="has the shape"):
        group.load(str(tmp_path / "saved"))
