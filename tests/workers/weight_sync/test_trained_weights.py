"""After each of three training steps, every rollout engine holds exactly what the trainer would export."""

from collections.abc import Iterator

import pytest
import torch

from podium.protocol import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup
from podium.workers.weight_sync.groups import connect_groups, sync_groups
from podium.workers.weight_sync.transport.base import SyncSettings
from tests.models.tiny import ragged_batch, tiny_model
from tests.workers.conftest import ENV
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.test_fsdp import proto
from tests.workers.weight_sync.hosts import SyncHost

pytestmark = pytest.mark.slow

PROMPT, TOKENS = (5, 6, 7), 6
SETTINGS = SyncSettings("full", bucket_bytes=60_000, timeout_s=120.0)


@pytest.fixture(scope="module")
def pair(local_backend: Backend) -> Iterator[WorkerGroup]:
    """Two ranks over which the trainer is sharded, a rollout engine on each."""
    pool = ResourcePool([2])
    yield local_backend.start_group(pool, ClassWithInitArgs(SyncHost), env=ENV, timeout_s=300)


@pytest.mark.parametrize(
    ("engine", "architecture", "dtype"),
    [("hf", "qwen2", "float32"), ("hf", "llama_tied", "bfloat16"), ("vllm", "qwen3", "float32")],
)
def test_fsdp(pair: WorkerGroup, model_dirs: dict[str, str], engine: str, architecture: str, dtype: str):
    pair.build(model_dirs[architecture])
    pair.build_rollout(engine, model_dirs[architecture], dtype)
    version = 0
    for transport in ("colocated", "cpu", "sharded"):
        assert connect_groups([pair], transport, SETTINGS) == transport
        for _ in range(3):
            pair.train(proto(ragged_batch(4, seed=version)), weighted_log_probs, 4)
            reports = sync_groups([pair], version)
            assert pair.unequal(dtype) == [[], []], (transport, version)
            assert all(report.verified_buckets == report.buckets > 0 for report in reports)
            version += 1
    if dtype == "float32":
        model = tiny_model(architecture)
        model.load_state_dict(pair.weights()[0], strict=False)
        ids = list(PROMPT)
        with torch.no_grad():
            for _ in range(TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert pair.greedy(PROMPT, TOKENS) == [ids[len(PROMPT) :]] * 2
    pair.end_rollout()
