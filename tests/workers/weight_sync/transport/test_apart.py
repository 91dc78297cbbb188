"""Actor and rollout in processes of their own: trained weights arrive bit for bit, by each transport."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from podium.models.hf_layout import checkpoint_tensors
from podium.protocol import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup, make_backend
from podium.workers.weight_sync.groups import connect_groups, sync_groups
from podium.workers.weight_sync.transport.base import SyncSettings
from tests.models.tiny import ragged_batch, save_tiny, tiny_model
from tests.workers.conftest import ENV
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.test_fsdp import proto
from tests.workers.weight_sync.end_hosts import ActorEnd, ActorOnDevice, RolloutEnd, RolloutOnDevice

PROMPTS = [(5, 6, 7), (9,), (11, 12, 13, 14, 15)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Backend]:
    with make_backend("local", in_process=False) as backend:
        yield backend


@pytest.fixture(scope="module")
def ends(processes: Backend) -> tuple[WorkerGroup, WorkerGroup]:
    """Two actor ranks and one of the rollout."""
    actor = processes.start_group(ResourcePool([2]), ClassWithInitArgs(ActorEnd), env=ENV, timeout_s=120)
    rollout = processes.start_group(ResourcePool([1]), ClassWithInitArgs(RolloutEnd), env=ENV, timeout_s=120)
    return actor, rollout


def check_held(rollout: WorkerGroup, version: int, sent: dict[str, torch.Tensor]) -> None:
    """Every rank holds its boxes of what was sent, and all of it together."""
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in sent.items()}
    for held_version, pieces in rollout.held():
        assert held_version == version
        for name, starts, tensor in pieces:
            box = tuple(slice(start, start + size) for start, size in zip(starts, tensor.shape, strict=True))
            torch.testing.assert_close(tensor, sent[name][box], rtol=0, atol=0)
            covered[name][box] = True
    assert all(mask.all() for mask in covered.values())


def check_greedy(rollout: WorkerGroup, version: int, sent: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Generations are those of transformers with the weights that were sent."""
    with torch.no_grad():
        for name, tensor in checkpoint_tensors(model):
            tensor.copy_(sent[name])
    for answers in rollout.greedy(PROMPTS, 6, version):
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, eos_token_id=None
            )
            assert answer == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_what_is_on_another_device_goes_through_the_actor_on_mine(processes: Backend, model_dirs: dict[str, str]):
    """Two devices, an actor and a rollout on each: half of every rollout's weights come from the other device."""
    kinds = (ActorOnDevice, RolloutOnDevice)
    actor, rollout = (
        processes.start_group(ResourcePool([2]), ClassWithInitArgs(kind), env=ENV, timeout_s=300) for kind in kinds
    )
    actor.build(model_dirs["qwen3"])
    rollout.build_rollout("hf", model_dirs["qwen3"], "float32")
    assert connect_groups([actor, rollout], "auto", SyncSettings(bucket_bytes=50_000, timeout_s=60)) == "ipc"
    for version in range(2):
        actor.train(proto(ragged_batch(4, seed=version)), weighted_log_probs, 4)
        reports = sync_groups([actor, rollout], version)
        sent = actor.weights()[0]
        check_held(rollout, version, sent)
        for report in reports[2:]:
            assert report.bytes_received == sum(tensor.nbytes for tensor in sent.values())
    actor.shutdown()
    rollout.shutdown()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_trained_weights_arrive(ends: tuple[WorkerGroup, WorkerGroup], model_dirs: dict[str, str], transport: str):
    actor, rollout = ends
    actor.build(model_dirs["qwen3"])
    rollout.build_rollout("hf", model_dirs["qwen3"], "float32")
    settings = SyncSettings(bucket_bytes=50_000, timeout_s=30)
    assert connect_groups([actor, rollout], transport, settings) == transport
    for version in range(3):
        actor.train(proto(ragged_batch(4, seed=version)), weighted_log_probs, 4)
        reports = sync_groups([actor, rollout], version)
        sent = actor.weights()[0]
        check_held(rollout, version, sent)
        size = sum(tensor.nbytes for tensor in sent.values())
        assert sum(report.bytes_received for report in reports) == size
        assert sum(report.bytes_sent for report in reports) >= size
        assert reports[-1].verified_buckets == reports[-1].buckets > 4
    check_greedy(rollout, 2, sent, tiny_model("qwen3"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_tensors_arrive_where_they_belong(ends: tuple[WorkerGroup, WorkerGroup], tmp_path: Path, dtype: str):
    """Sent from the trainer's memory, where no cast is needed, and received in the engine's."""
    actor, rollout = ends
    path = save_tiny("qwen3", tmp_path, hidden_size=256, intermediate_size=1280)
    actor.build(path)
    rollout.build_rollout("hf", path, dtype)
    connect_groups([actor, rollout], "broadcast", SyncSettings(bucket_bytes=1 << 20, timeout_s=30))
    for version in range(2):
        actor.train(proto(ragged_batch(4, seed=version)), weighted_log_probs, 4)
        reports = sync_groups([actor, rollout], version)
        check_held(rollout, version, actor.weights(dtype)[0])
        assert reports[-1].verified_buckets == reports[-1].buckets > 2
