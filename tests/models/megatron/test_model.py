"""Megatron models against Hugging Face's: the outputs of each row, and the weights there and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium.models.megatron.parallel import MegatronLayout
from podium.protocol import WorkerGroup
from tests.models.megatron.conftest import Ranks
from tests.models.megatron.hosts import Part
from tests.models.tiny import VOCABULARY, plain_logits, save_tiny, tiny_model

LAYERS = 4
DENSE = ("llama", "llama_tied", "qwen2", "qwen3", "mistral", "gemma")
EXPERTS = ("qwen3_moe", "mixtral")
Layout = MegatronLayout

QUICK = [
    (1, Layout()),
    (2, Layout(tp=2, sequence_parallel=True)),
    (2, Layout(pp=2, vpp=2)),
    (2, Layout(cp=2)),
]
SLOW = [
    (2, Layout(tp=2)),
    (2, Layout(pp=2)),
    (2, Layout(pp=2, stage_layers=(1, 3))),
    (2, Layout()),
    (4, Layout(tp=2)),
    (4, Layout(tp=4)),
    (4, Layout(pp=4)),
    (4, Layout(tp=2, pp=2)),
    (4, Layout(tp=2, pp=2, vpp=2, sequence_parallel=True)),
    (4, Layout(tp=2, cp=2)),
    (4, Layout(pp=2, cp=2)),
]
# With experts, tensor parallel needs sequence parallel.
SLOW_EXPERTS = [
    (1, Layout()),
    (2, Layout()),
    (2, Layout(pp=2)),
    (2, Layout(cp=2)),
    (2, Layout(tp=2, sequence_parallel=True)),
    (2, Layout(tp=2, ep=2, sequence_parallel=True)),
    (4, Layout(ep=2)),
    (4, Layout(ep=4)),
    (4, Layout(pp=2, ep=2)),
    (4, Layout(tp=2, ep=2, sequence_parallel=True)),
    (4, Layout(tp=2, pp=2, vpp=2, ep=2, sequence_parallel=True)),
]


def cases(layouts: list[tuple[int, Layout]]) -> list[Any]:
    return [pytest.param(number, layout, id=f"{layout} on {number}") for number, layout in layouts]


@pytest.fixture(scope="session")
def rows() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [
        torch.randint(2, VOCABULARY, (int(n),), generator=g).tolist() for n in torch.randint(3, 17, (8,), generator=g)
    ]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("megatron")
    return {name: save_tiny(name, root / name, num_hidden_layers=LAYERS) for name in DENSE + EXPERTS}


def assemble(parts_by_rank: list[list[Part]], rows: list[list[int]]) -> list[torch.Tensor]:
    """Whole outputs (L, V) of each row. Every position must come from exactly one rank."""
    width = next(output.shape[-1] for parts in parts_by_rank for _, _, output in parts)
    whole = [torch.full((len(row), width), torch.nan) for row in rows]
    for parts in parts_by_rank:
        for row, positions, output in parts:
            assert whole[row][positions].isnan().all(), "two ranks tell of the same position"
            whole[row][positions] = output
    return whole


def equals_hugging_face(group: WorkerGroup, layout: Layout, name: str, path: str, rows: list[list[int]]) -> None:
    model = tiny_model(name, num_hidden_layers=LAYERS)
    group.build(path, layout)
    for packed in (False, True):
        got = assemble(group.outputs(rows, packed, 2), rows)
        for row, logits in zip(rows, got, strict=True):
            torch.testing.assert_close(logits[:, :VOCABULARY], plain_logits(model, row), rtol=0, atol=1e-4)
            assert (logits[:, VOCABULARY:] < -1e8).all(), "rows that round the vocabulary up have probability 0"
    kept = load_file(Path(path) / "model.safetensors")
    for weights in group.weights():
        assert weights.keys() == kept.keys()
        assert all(torch.equal(weights[key], kept[key]) for key in kept)


@pytest.mark.parametrize(("number", "layout"), cases(QUICK))
@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_a_model_equals_hugging_face(ranks: Ranks, number: int, layout: Layout, name: str, saved, rows):
    equals_hugging_face(ranks(number), layout, name, saved[name], rows)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "layout"), cases(QUICK + SLOW))
@pytest.mark.parametrize("name", DENSE)
def test_every_layout_of_every_architecture_equals_hugging_face(
    ranks: Ranks, number: int, layout: Layout, name: str, saved, rows
):
    equals_hugging_face(ranks(number), layout, name, saved[name], rows)


def test_experts_on_two_ranks_equal_hugging_face(ranks: Ranks, saved, rows):
    equals_hugging_face(ranks(2), Layout(ep=2), "qwen3_moe", saved["qwen3_moe"], rows)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "layout"), cases(SLOW_EXPERTS))
@pytest.mark.parametrize("name", EXPERTS)
def test_every_layout_of_experts_equals_hugging_face(ranks: Ranks, number: int, layout: Layout, name: str, saved, rows):
    equals_hugging_face(ranks(number), layout, name, saved[name], rows)
