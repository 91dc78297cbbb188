"""From every layout of real Megatron and FSDP actors into real engines: bits, and generations, after training."""

from typing import Any

import pytest

from podium.protocol import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup
from podium.trainer.config.shared import MegatronConfig
from podium.workers.weight_sync.groups import connect_groups, sync_groups
from podium.workers.weight_sync.transport.base import SyncSettings
from tests.models.tiny import ragged_batch, save_tiny, tiny_model
from tests.workers.conftest import ENV
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.test_fsdp import proto
from tests.workers.weight_sync.end_hosts import ActorEnd, MegatronEnd, RolloutEnd
from tests.workers.weight_sync.transport.test_apart import check_greedy, check_held

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "pp2vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp1": (1, {}),
}


@pytest.fixture
def actors(local_backend: Backend) -> Any:
    """Starts a group for one test."""
    started: list[WorkerGroup] = []

    def start(kind: type, ranks: int) -> WorkerGroup:
        pool = ResourcePool([ranks])
        started.append(local_backend.start_group(pool, ClassWithInitArgs(kind), env=ENV, timeout_s=600))
        return started[-1]

    yield start
    for group in started:
        group.shutdown()


def build(group: WorkerGroup, engine: str, path: str, dtype: str, options: dict[str, int]) -> None:
    if engine == "fsdp":
        group.build(path)
    else:
        group.build(path, MegatronConfig(dtype=dtype, **options))


def train_and_sync(group: WorkerGroup, others: list[WorkerGroup], steps: int = 3) -> None:
    for version in range(steps):
        group.train(proto(ragged_batch(8, seed=version)), weighted_log_probs, 4)
        sync_groups([group, *others], version)


@pytest.mark.parametrize(
    ("name", "engine", "layout", "rollout", "tp", "dtype"),
    [
        ("qwen2", "megatron", "tp2", "hf", 1, "float32"),
        ("llama_tied", "megatron", "pp2", "hf", 1, "bfloat16"),
        ("qwen2", "megatron", "tp2", "vllm", 1, "float32"),
        ("qwen3", "megatron", "pp2", "vllm", 1, "float32"),
        ("llama", "megatron", "pp2vpp2", "vllm", 1, "float32"),
        ("qwen2", "megatron", "tp2", "vllm", 2, "float32"),
        ("llama_tied", "megatron", "dp2", "vllm", 2, "bfloat16"),
        ("qwen3_moe", "megatron", "ep2", "vllm", 1, "float32"),
        ("qwen3_moe", "megatron", "tp2", "vllm", 2, "float32"),
        ("mixtral", "fsdp", "dp2", "vllm", 1, "float32"),
        ("qwen3", "fsdp", "dp2", "vllm", 2, "bfloat16"),
        ("qwen2", "megatron", "tp2pp2", "hf", 1, "float32"),
    ],
)
def test_colocated(actors: Any, tmp_path: Any, name: str, engine: str, layout: str, rollout: str, tp: int, dtype: str):
    ranks, options = LAYOUTS[layout]
    path = save_tiny(name, tmp_path / name, num_hidden_layers=4)
    group = actors(ActorEnd if engine == "fsdp" else MegatronEnd, ranks)
    build(group, engine, path, dtype, options)
    group.build_rollout(rollout, path, dtype, tp)
    assert connect_groups([group], "auto", SyncSettings(bucket_bytes=100_000, timeout_s=60)) == "colocated"
    train_and_sync(group, [])
    sent = group.weights(dtype)[0]
    check_held(group, 2, sent)
    if dtype == "float32":
        check_greedy(group, 2, sent, tiny_model(name, num_hidden_layers=4))


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize(
    ("name", "layout", "rollout", "tp"),
    [
        ("qwen2", "tp2", "vllm", 1),
        ("qwen3", "tp1", "vllm", 2),
        ("llama", "pp2vpp2", "vllm", 2),
        ("qwen2", "pp2", "hf", 1),
    ],
)
def test_apart(
    actors: Any, local_backend: Any, tmp_path: Any, transport: str, name: str, layout: str, rollout: str, tp: int
):
    ranks, options = LAYOUTS[layout]
    path = save_tiny(name, tmp_path / name, num_hidden_layers=4)
    local_backend._in_process = False
    try:
        group, other = actors(MegatronEnd, ranks), actors(RolloutEnd, tp)
    finally:
        local_backend._in_process = True
    build(group, "megatron", path, "float32", options)
    other.build_rollout(rollout, path, "float32", tp)
    connect_groups([group, other], transport, SyncSettings(bucket_bytes=100_000, timeout_s=60))
    train_and_sync(group, [other])
    sent = group.weights()[0]
    check_held(other, 2, sent)
    check_greedy(other, 2, sent, tiny_model(name, num_hidden_layers=4))
