"""From every layout of real Megatron and FSDP actors into real engines, by every transport: bits, and generations."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from podium.protocol import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup, make_backend
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

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2uneven": (2, {"pipeline_model_parallel_size": 2, "pipeline_stage_layers": [1, 3]}),
    "pp2vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "fsdp2": (2, {}),
}
TOGETHER = ("colocated", "cpu", "sharded")
APART = ("ipc", "broadcast", "cpu", "sharded")
SETTINGS = SyncSettings(bucket_bytes=100_000, timeout_s=60)

Start = Callable[[type, int], WorkerGroup]


@pytest.fixture(scope="module")
def processes() -> Iterator[Backend]:
    with make_backend("local", in_process=False) as backend:
        yield backend


@pytest.fixture(scope="module")
def started(processes: Backend) -> Iterator[Start]:
    """Groups by class and size, which tests share; those of another class are ended first: they take memory."""
    groups: dict[tuple[type, int], WorkerGroup] = {}

    def start(kind: type, ranks: int) -> WorkerGroup:
        for key in [key for key in groups if (key[0] is RolloutEnd) == (kind is RolloutEnd) and key != (kind, ranks)]:
            groups.pop(key).shutdown()
        if (kind, ranks) not in groups:
            groups[kind, ranks] = processes.start_group(
                ResourcePool([ranks]), ClassWithInitArgs(kind), env=ENV, timeout_s=300
            )
        return groups[kind, ranks]

    yield start
    for group in groups.values():
        group.shutdown()


def built(started: Start, path: str, layout: str, dtype: str) -> WorkerGroup:
    """An actor, after three steps."""
    ranks, options = LAYOUTS[layout]
    group = started(ActorEnd if layout == "fsdp2" else MegatronEnd, ranks)
    group.drop_rollout()
    if layout == "fsdp2":
        group.build(path)
    else:
        group.build(path, MegatronConfig(dtype=dtype, **options))
    for seed in range(3):
        group.train(proto(ragged_batch(8, seed=seed)), weighted_log_probs, 4)
    return group


def check_transports(
    names: tuple[str, ...], actor: WorkerGroup, rollout: WorkerGroup, dtype: str, model: Any | None
) -> None:
    """A step, while the rollout sleeps, and a sync by the next transport: it then holds, and generates with, what the
    actor exports."""
    groups = [actor] if actor is rollout else [actor, rollout]
    for version, transport in enumerate(names):
        assert connect_groups(groups, transport, SETTINGS) == transport
        assert all(freed > 0 for freed in rollout.sleep())
        actor.train(proto(ragged_batch(8, seed=10 + version)), weighted_log_probs, 4)
        reports = sync_groups(groups, version)
        assert all(report.transport == transport for report in reports)
        sent = actor.weights(dtype)[0]
        check_held(rollout, version, sent)
        if model is not None:
            check_greedy(rollout, version, sent, model)


@pytest.mark.parametrize(
    ("name", "layout", "rollout", "tp", "dtype"),
    [
        ("qwen2", "tp2", "hf", 1, "float32"),
        ("llama_tied", "pp2", "hf", 1, "bfloat16"),
        ("llama_tied", "pp2uneven", "hf", 1, "float32"),
        ("qwen2", "tp2", "vllm", 1, "float32"),
        ("qwen3", "pp2", "vllm", 1, "float32"),
        ("llama", "pp2vpp2", "vllm", 1, "float32"),
        ("qwen3_moe", "ep2", "vllm", 1, "float32"),
        ("qwen3_moe", "pp2vpp2", "hf", 1, "float32"),
        ("qwen2", "tp2", "vllm", 2, "float32"),
        ("llama_tied", "dp2", "vllm", 2, "bfloat16"),
        ("qwen3", "pp2", "vllm", 2, "float32"),
        ("qwen3_moe", "tp2sp", "vllm", 2, "float32"),
        ("mixtral", "fsdp2", "vllm", 1, "float32"),
        ("qwen3", "fsdp2", "vllm", 2, "bfloat16"),
        ("qwen2", "tp2pp2", "hf", 1, "float32"),
    ],
)
def test_together(started: Start, tmp_path: Any, name: str, layout: str, rollout: str, tp: int, dtype: str):
    """The engines in the actor's processes."""
    path = save_tiny(name, tmp_path / name, num_hidden_layers=4)
    group = built(started, path, layout, dtype)
    group.build_rollout(rollout, path, dtype, tp)
    assert connect_groups([group], "auto", SETTINGS) == "colocated"
    names = TOGETHER if layout == "fsdp2" else (*TOGETHER, "memory_buffer")
    model = tiny_model(name, num_hidden_layers=4) if dtype == "float32" else None
    check_transports(names, group, group, dtype, model)


@pytest.mark.parametrize(
    ("name", "layout", "rollout", "tp", "dtype"),
    [
        ("qwen3", "tp1", "vllm", 2, "float32"),
        ("qwen2", "tp2", "vllm", 2, "bfloat16"),
        ("llama", "pp2vpp2", "vllm", 2, "float32"),
        ("qwen3", "fsdp2", "vllm", 2, "float32"),
        ("qwen2", "tp2", "vllm", 1, "float32"),
        ("llama_tied", "pp2", "hf", 1, "float32"),
        ("llama", "pp2vpp2", "hf", 1, "float32"),
        ("llama_tied", "dp2", "hf", 1, "bfloat16"),
        ("qwen3_moe", "ep2", "vllm", 1, "float32"),
        ("qwen2", "tp2pp2", "hf", 1, "float32"),
    ],
)
def test_apart(started: Start, tmp_path: Any, name: str, layout: str, rollout: str, tp: int, dtype: str):
    """The engines in processes of their own."""
    path = save_tiny(name, tmp_path / name, num_hidden_layers=4)
    group, other = built(started, path, layout, dtype), started(RolloutEnd, tp)
    other.build_rollout(rollout, path, dtype, tp)
    model = tiny_model(name, num_hidden_layers=4) if dtype == "float32" else None
    check_transports(APART, group, other, dtype, model)
