"""The Megatron engine, in every layout, against a plain loop over the same Hugging Face model and the FSDP engine."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from podium.protocol import Backend, ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup
from podium.trainer.config.shared import MegatronConfig
from tests.models.tiny import ragged_batch, save_tiny, tiny_model
from tests.workers.conftest import ENV
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.megatron_hosts import MegatronHost
from tests.workers.engine.plain import Batch, plain_outputs, plain_training

LAYERS = 4
Start = Callable[[int], WorkerGroup]


def layout(text: str) -> tuple[int, MegatronConfig]:
    """``"tp2 pp2 dp1 sp packed"`` -> ranks and configuration."""
    keys = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    flags = {"sp": {"sequence_parallel": True}, "packed": {"use_remove_padding": True}}
    flags["uneven"] = {"pipeline_stage_layers": [1, 3]}
    flags["bf16"] = {"dtype": "bfloat16"}
    ranks, fields = 1, {}
    for part in text.split():
        if part in flags:
            fields.update(flags[part])
            continue
        name, size = part.rstrip("0123456789"), int(part.lstrip("abcdefghijklmnopqrstuvwxyz"))
        ranks *= size if name in ("tp", "pp", "cp", "dp") else 1
        if name in keys:
            fields[keys[name]] = size
    return ranks, MegatronConfig(**fields)


@pytest.fixture(scope="module")
def start(local_backend: Backend) -> Iterator[Start]:
    """Hosts on so many ranks, started once each."""
    groups: dict[int, WorkerGroup] = {}

    def group(ranks: int) -> WorkerGroup:
        if ranks not in groups:
            groups[ranks] = local_backend.start_group(
                ResourcePool([ranks]), ClassWithInitArgs(MegatronHost), env=ENV, timeout_s=120
            )
        return groups[ranks]

    yield group
    for started in groups.values():
        started.shutdown()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("deep")
    names = ("llama", "llama_tied", "qwen2", "qwen3")
    return {name: save_tiny(name, root / name, num_hidden_layers=LAYERS) for name in names}


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return [ragged_batch(8, seed=seed) for seed in range(3)]


def proto(batch: Batch) -> DataProto:
    return DataProto.from_dict(dict(batch))


def build(start: Start, text: str, path: str, **options: Any) -> WorkerGroup:
    ranks, config = layout(text)
    group = start(ranks)
    group.build(path, config, **options)
    group._meshes.clear()  # the group remembers where ranks stand, and this layout is another
    return group


def close(left: Batch, right: Batch, atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


DEFAULT = ("tp2", "pp2 vpp2", "tp2 sp packed")
MORE = (
    *("tp1", "tp1 packed", "dp2", "pp2", "pp2 packed", "pp2 uneven", "tp2 sp", "cp2", "cp2 packed"),
    *("tp4", "pp4", "tp2 pp2", "tp2 pp2 sp packed", "tp2 dp2", "tp2 cp2 sp", "tp2 cp2 sp packed", "cp4"),
    *("pp2 dp2", "pp2 vpp2 dp2", "pp2 vpp2 packed", "tp2 pp2 vpp2", "pp2 cp2"),
)
LAYOUTS = [*DEFAULT, *(pytest.param(text, marks=pytest.mark.slow) for text in MORE)]


@pytest.mark.parametrize("text", LAYOUTS)
def test_outputs_equal_the_plain_model(start: Start, paths: dict[str, str], batches: list[Batch], text: str):
    for name in ("qwen2", "llama", "llama_tied", "qwen3"):
        expected = plain_outputs(tiny_model(name, num_hidden_layers=LAYERS), batches[0])
        group = build(start, text, paths[name], frozen=True)
        for micro in (1, 3):
            outputs = group.infer_everywhere(proto(batches[0]), micro).batch
            close(dict(outputs.items()), expected, 1e-4)
        shards = {name: value.chunk(len({dp for dp, _ in group.kept()})) for name, value in outputs.items()}
        for dp, got in group.kept():
            same(got, {name: parts[dp] for name, parts in shards.items()})


@pytest.mark.parametrize("text", LAYOUTS)
def test_training_equals_a_plain_loop(start: Start, paths: dict[str, str], batches: list[Batch], text: str):
    for name, micro in (("qwen2", 1), ("llama", 4), ("llama_tied", 3), ("qwen3", 2)):
        expected, expected_metrics = plain_training(name, batches, grad_clip=1.0, num_hidden_layers=LAYERS)
        group = build(start, text, paths[name])
        for batch, plain in zip(batches, expected_metrics, strict=True):
            metrics = group.train(proto(batch), weighted_log_probs, micro)
            assert all(shard == metrics[0] for shard in metrics), "shards disagree on the metrics"
            assert {k: metrics[0][k] for k in plain} == pytest.approx(plain, rel=2e-4)
        assert expected_metrics[0]["grad_norm"] > 1.0, "clipping is part of what is tested"
        weights = group.weights()
        for rank in weights:
            close(rank, expected, 2e-6)
