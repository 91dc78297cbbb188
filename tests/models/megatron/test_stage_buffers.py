"""Every pipeline stage's flat memory on every rank, under the names of the checkpoint."""

from pathlib import Path

import pytest
import torch

from podium.models.megatron.parallel import MegatronLayout as Layout
from tests.models.megatron.conftest import Ranks
from tests.models.tiny import save_tiny


@pytest.mark.parametrize(
    "layout", [Layout(pp=2), Layout(pp=2, vpp=2), Layout(pp=2, stage_layers=(1, 3)), Layout(tp=2)], ids=str
)
def test_gathered_stages_are_the_whole_model(ranks: Ranks, layout: Layout, tmp_path: Path):
    ranks(2).build(save_tiny("qwen2", tmp_path, num_hidden_layers=4), layout)
    whole = ranks(2).weights()[0]
    for found, messages in ranks(2).gather_stages():
        assert messages == layout.pp, "one message for each stage: the model has one precision"
        covered = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
        for piece in found:
            box = tuple(slice(start, stop) for start, stop in zip(piece.starts, piece.stops, strict=True))
            assert torch.equal(piece.tensor, whole[piece.name][box])
            covered[piece.name][box] += 1
        assert all((count <= 1).all() for count in covered.values())
        assert (
            sum(int(count.sum()) for count in covered.values()) >= sum(t.numel() for t in whole.values()) // layout.tp
        )
