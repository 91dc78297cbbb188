"""The layouts made from sizes alone are those that the real engines make: element for element, on every rank."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from podium.models.megatron.parallel import MegatronLayout
from podium.protocol import ClassWithInitArgs, ResourcePool, WorkerGroup, make_backend
from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.layouts import FSDPShards, Layout, MegatronShards, RolloutShards
from podium.workers.weight_sync.parameters import ModelShape
from tests.workers.weight_sync.plan_checks import pieces_of
from tests.workers.weight_sync.plan_hosts import LayoutHost

pytestmark = pytest.mark.slow  # four ranks import everything, and each starts engines

RANKS = 4
ENV = {
    "OMP_NUM_THREADS": "1",
    "PODIUM_DEVICE": "cpu",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}
_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True, "hidden_size": 128},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
DENSE = [
    MegatronLayout(),
    MegatronLayout(tp=2),
    MegatronLayout(tp=4),  # twice as many as kv heads
    MegatronLayout(pp=4),
    MegatronLayout(tp=2, pp=2),
    MegatronLayout(pp=2, stage_layers=(1, 3)),
    MegatronLayout(pp=2, vpp=2, cp=2),
]
SPREAD = [
    MegatronLayout(ep=2),
    MegatronLayout(tp=2, sequence_parallel=True),
    MegatronLayout(tp=2, pp=2, ep=2, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[WorkerGroup]:
    with make_backend("local") as backend:
        yield backend.start_group(ResourcePool([RANKS]), ClassWithInitArgs(LayoutHost), env=ENV, timeout_s=300)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    def save(name: str) -> str:
        path: Path = tmp_path_factory.mktemp(name)
        config = AutoConfig.for_model(name, **{**_SHAPE, **MODELS[name]})
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]  # vLLM guesses where it is not told
        config.save_pretrained(path)
        return str(path)

    return save


def assert_alike(layout: Layout, held: list[list[Box]]) -> None:
    """Both hold the same elements on each rank, however they cut them into boxes."""
    pieces = pieces_of(layout.table())
    shapes = {parameter.name: parameter.shape for parameter in layout.model.parameters()}
    for rank, boxes in enumerate(held):
        ours, theirs = covered(pieces.get(rank, []), shapes), covered(boxes, shapes)
        assert ours.keys() == theirs.keys(), rank
        for name in ours:
            assert (ours[name] == theirs[name]).all(), f"rank {rank}: {name}"


def covered(boxes: list[Box], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """How many boxes hold each element, by tensor."""
    count: dict[str, np.ndarray] = {}
    for box in boxes:
        at = tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
        if box.starts != box.stops and all(s.start < s.stop for s in at):
            count.setdefault(box.name, np.zeros(shapes[box.name], dtype=int))[at] += 1
    return count


@pytest.mark.parametrize("name", MODELS)
def test_megatron(hosts: WorkerGroup, saved: Callable[[str], str], name: str):
    pytest.importorskip("megatron.core", exc_type=ImportError)
    path = saved(name)
    for layout in SPREAD if "num_experts_per_tok" in MODELS[name] else DENSE:
        dp = RANKS // layout.model_ranks
        assert_alike(MegatronShards(ModelShape.load(path), layout, dp), hosts.megatron(path, layout))


@pytest.mark.parametrize("name", MODELS)
def test_fsdp(hosts: WorkerGroup, saved: Callable[[str], str], name: str):
    path = saved(name)
    assert_alike(FSDPShards(ModelShape.load(path), RANKS), hosts.fsdp(path))


@pytest.mark.parametrize(("name", "tp"), [("llama", 4), ("qwen2", 2), ("qwen3_moe", 2)])
def test_vllm(hosts: WorkerGroup, saved: Callable[[str], str], name: str, tp: int):
    pytest.importorskip("vllm", exc_type=ImportError)
    path = saved(name)
    ranks = np.arange(RANKS).reshape(-1, tp)
    assert_alike(RolloutShards(ModelShape.load(path), ranks), hosts.vllm(path, tp))
