"""The table: every parameter is made up of the checkpoint's tensors, each of their elements once."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from podium.models.megatron.name_map import _part_of, segments
from podium.models.megatron.parallel import MegatronLayout
from tests.models.megatron.conftest import Ranks
from tests.models.tiny import save_tiny

NAMES = ["q", "k", "v"]


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_heads_by_group_are_those_of_the_projections(groups: int, per_group: int, parts: int):
    """Against the definition, on rows that say which projection and row they are."""
    width, heads = 8, groups * per_group
    config = heads_of(heads, groups, width)
    q, k, v = (torch.arange(n * width) + 1000 * i for i, n in enumerate((heads, groups, groups)))
    by_group = [
        torch.cat(
            [q[g * per_group * width : (g + 1) * per_group * width], k[g * width :][:width], v[g * width :][:width]]
        )
        for g in range(groups)
    ]
    expected, own = torch.cat(by_group), (heads + 2 * groups) * width // parts
    projections = dict(zip(NAMES, (q, k, v), strict=True))
    for rank in range(parts):
        rows = torch.full((own,), -1)
        for segment, offset in _part_of(segments(config, "groups", NAMES, own * parts, parts), rank * own, own):
            rows[offset : offset + segment.stop - segment.start] = projections[segment.name][
                segment.start : segment.stop
            ]
        assert torch.equal(rows, expected[rank * own : (rank + 1) * own])


def heads_of(heads: int, groups: int, width: int):
    return SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups, head_dim=width)


@pytest.mark.parametrize(
    ("number", "layout", "name"),
    [
        (1, MegatronLayout(), "qwen2"),
        (2, MegatronLayout(tp=2), "qwen3"),
        (2, MegatronLayout(pp=2, vpp=2), "llama_tied"),
        (2, MegatronLayout(ep=2), "mixtral"),
    ],
    ids=str,
)
def test_pieces_cover_the_checkpoint_and_are_the_parameters_own_memory(
    ranks: Ranks, number: int, layout: MegatronLayout, name: str, tmp_path
):
    path = save_tiny(name, tmp_path, num_hidden_layers=4)
    kept = load_file(tmp_path / "model.safetensors")
    ranks(number).build(path, layout)
    held = {key: torch.zeros_like(tensor, dtype=torch.int) for key, tensor in kept.items()}
    for own in ranks(number).pieces():
        for piece in own:
            box = tuple(slice(*ends) for ends in zip(piece.starts, piece.stops, strict=True))
            assert torch.equal(piece.tensor, kept[piece.name][box])
            held[piece.name][box] += 1
    assert all((count > 0).all() for count in held.values()), "an element that no rank holds"
    assert all(ranks(number).writing_pieces_changes_the_model())
