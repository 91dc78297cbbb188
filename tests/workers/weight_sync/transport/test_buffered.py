"""Weights through a buffer in shared memory: what arrives, and what does not."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from podium.models.hf_layout import checkpoint_pieces
from podium.protocol.backend import free_port
from podium.utils.piece import Piece
from podium.workers.rollout.hf import HFRollout
from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.plan import ReshardPlan
from podium.workers.weight_sync.snapshot import SHARED_MEMORY
from podium.workers.weight_sync.transport.base import Link, Place, SyncSettings
from podium.workers.weight_sync.transport.buffered import BufferedTransport
from tests.models.tiny import tiny_model

CPU = BufferedTransport.over("cpu")


def halves(module: torch.nn.Module, half: int) -> list[Piece]:
    """The first or the second half of each tensor's rows."""
    shards = []
    for name, parameter in module.named_parameters():
        first = (len(parameter) + 1) // 2
        rows = parameter.data[:first] if half == 0 else parameter.data[first:]
        shards.append((name, (half * first, *(0,) * (parameter.dim() - 1)), rows))
    return checkpoint_pieces(module.config.model_type, shards)


@dataclass
class Side:
    """Two sources, of which the second has a rollout in its process, and a rollout apart, all in this process."""

    module: torch.nn.Module
    engines: list[HFRollout]
    transports: list[BufferedTransport]

    def publish_and_take(self, version: int) -> None:
        for transport in self.transports:
            transport.sync(version)

    def assert_equal(self) -> None:
        for engine in self.engines:
            held = {piece.name: piece.tensor for piece in engine.pieces()}
            for name, parameter in self.module.named_parameters():
                expected = parameter.data.to(held[name].dtype)
                torch.testing.assert_close(held[name], expected, rtol=0, atol=0)


@pytest.fixture(params=["float32", "bfloat16"])
def side(request: pytest.FixtureRequest, model_dirs: dict[str, str]) -> Iterator[Side]:
    module = tiny_model("qwen2", seed=7)
    engines = [HFRollout(model_dirs["qwen2"], dtype=request.param, max_num_seqs=8) for _ in range(2)]
    sources = [partial(halves, module, half) for half in range(2)]
    boxes = {rank: list(map(Box.of, source())) for rank, source in enumerate(sources)}
    wanted = {rank + 1: list(map(Box.of, engine.pieces())) for rank, engine in enumerate(engines)}
    places = [Place(f"rank {rank}", "here", "cpu", rank < 2, rank > 0) for rank in range(3)]
    plan, settings = ReshardPlan.from_pieces(boxes, wanted), SyncSettings("full", 100_000, timeout_s=2.0)
    rendezvous = ("127.0.0.1", free_port())
    transports = [
        CPU(
            Link(
                plan,
                rank,
                places,
                rendezvous,
                b"of this test",
                settings,
                sources[rank] if rank < 2 else None,
                engines[rank - 1] if rank else None,
            )
        )
        for rank in range(3)
    ]
    for transport in transports:
        transport.connect()
    yield Side(module, engines, transports)
    for transport in transports:
        transport.close()
    assert not list(SHARED_MEMORY.glob(f"*{rendezvous[1]}*"))


def test_every_version_arrives_bit_for_bit(side: Side):
    for version in (0, 1, 2, 7):
        with torch.no_grad():
            for parameter in side.module.parameters():
                parameter.add_(torch.randn_like(parameter))
        side.publish_and_take(version)
        side.assert_equal()
        assert [engine.weight_version for engine in side.engines] == [version] * 2
