"""Buckets on their way: the next is started before the last has arrived, and none is touched while it travels."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from podium.utils.piece import Piece
from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.plan import ReshardPlan
from podium.workers.weight_sync.transport.base import Link, Place, Sync, SyncSettings
from podium.workers.weight_sync.transport.exchange import Exchange

SHAPES = {"large": (600, 256), "a": (7, 256), "wide": (40, 256), "b": (300, 256), "c": (3, 256)}
BUCKET_BYTES = 192 << 10


def pieces(fill: Callable[[tuple[int, int]], torch.Tensor]) -> list[Piece]:
    return [Piece(name, (0, 0), shape, fill(shape)) for name, shape in SHAPES.items()]


class Wire:
    """Stands where a process group does: messages are on their way from `start` to `finish`, and only then copied.

    Args:
        received: what arrives at each `finish`; None records what is sent.
    """

    def __init__(self, received: list[list[torch.Tensor]] | None = None):
        self.received, self.sent = received, list[list[torch.Tensor]]()
        self.events: list[tuple[str, int]] = []

    def start(self, sync: Sync, receives: list[tuple[torch.Tensor, int]], sends: list[tuple[torch.Tensor, int]]) -> Any:
        number = sum(event == "start" for event, _ in self.events)
        self.events.append(("start", number))
        return number, [message for message, _ in receives or sends]

    def finish(self, sync: Sync, running: Any) -> None:
        number, messages = running
        self.events.append(("finish", number))
        if self.received is None:
            self.sent.append([message.clone() for message in messages])
        else:
            for message, came in zip(messages, self.received[number], strict=True):
                message.copy_(came)

    def close(self) -> None:
        """Nothing to end."""


def exchanged(plan: ReshardPlan, rank: int, wire: Wire, held: list[Piece], verify: str) -> Sync:
    places = [Place("actor", "", "cpu", True, False), Place("rollout", "", "cpu", False, True)]
    engine: Any = SimpleNamespace(pieces=lambda: held, overwrite=lambda: None) if rank else None
    source = None if rank else lambda: held
    link = Link(plan, rank, places, ("", 0), b"", SyncSettings(verify, BUCKET_BYTES), source, engine)
    sync = Sync(link, 0, "broadcast")
    Exchange(link, wire)(sync)
    return sync


@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_bucket_is_started_before_the_last_has_arrived_and_arrives_as_it_was(verify: str):
    trained, generated = pieces(torch.randn), pieces(torch.zeros)
    boxes = [Box.of(piece) for piece in trained]
    plan = ReshardPlan.from_pieces({0: boxes}, {1: boxes})
    sending = Wire()
    exchanged(plan, 0, sending, trained, verify)
    receiving = Wire(sending.sent)
    report = exchanged(plan, 1, receiving, generated, verify).report
    for mine, theirs in zip(trained, generated, strict=True):
        torch.testing.assert_close(theirs.tensor, mine.tensor, rtol=0, atol=0)
    assert report.verified_buckets == (report.buckets if verify == "full" else 0)
    for wire in (sending, receiving):
        moment = {event: place for place, event in enumerate(wire.events)}
        for step in range(1, report.buckets):  # start and finish 0 are the agreement on the version
            assert moment["start", step + 1] < moment["finish", step]
            assert moment["finish", step] < moment["start", step + 2]
