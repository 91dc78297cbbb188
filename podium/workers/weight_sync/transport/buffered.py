"""Versions lie in a weight buffer: those who send write them there, and those who receive take them from it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from podium.workers.weight_sync.lane import Bucket, Lane, lanes_with_local
from podium.workers.weight_sync.snapshot import Snapshot, SnapshotError
from podium.workers.weight_sync.transport.base import Place, Sync, Transport
from podium.workers.weight_sync.transport.host import deliver_from_host, pack_to_host
from podium.workers.weight_sync.weight_buffer import WEIGHT_BUFFERS, WeightBuffer

_ALIGNMENT = 64  # bytes, of a bucket in a buffer

_Frame = tuple[Lane, int, torch.Tensor]
"""A lane, the number of a bucket there, and the memory that the bucket is packed in."""


@dataclass(frozen=True)
class _Stock:
    """All that one source has to give, and the buffer in which it lies."""

    lanes: list[Lane]
    buffer: WeightBuffer

    def frames(self, snapshot: Snapshot) -> Iterator[_Frame]:
        """The memory of each bucket."""
        start = 0
        for lane in self.lanes:
            for index, bucket in enumerate(lane.buckets):
                yield lane, index, snapshot.memory[start : start + bucket.nbytes]
                start += _aligned(bucket)


class BufferedTransport(Transport):
    """Each source publishes all that it has to give, what stays in its process included, as one version.

    A destination holds that version of every source that it needs, and has compared its checksums, before it writes the
    first byte to its engine: where that fails, the engine keeps its old weights.
    """

    buffer: ClassVar[type[WeightBuffer]]

    @classmethod
    def over(cls, name: str) -> type["BufferedTransport"]:
        """The transport over the buffer registered as `name`."""
        buffer = WEIGHT_BUFFERS[name]
        return type(f"{buffer.__name__}Transport", (cls,), {"name": name, "buffer": buffer})

    @classmethod
    def check(cls, places: Sequence[Place]) -> None:
        cls.buffer.check(places)

    def connect(self) -> None:
        link = self.link
        self._stocks: dict[int, _Stock] = {}
        for source, place in enumerate(link.places):
            lanes = lanes_with_local(link.plan, source, link.settings.bucket_bytes) if place.is_source else []
            if lanes and (source == link.rank or any(link.rank in lane.destinations for lane in lanes)):
                nbytes = sum(_aligned(bucket) for lane in lanes for bucket in lane.buckets)
                # The port is this connection's alone.
                buffer = self.buffer(f"{link.rendezvous[1]}-{source}", nbytes, source == link.rank)
                self._stocks[source] = _Stock(lanes, buffer)

    def transfer(self, sync: Sync) -> None:
        if self.link.rank in self._stocks and self._stocks[self.link.rank].buffer.is_writer:
            self._publish(sync, self._stocks[self.link.rank])
        if self.link.engine is not None:
            self._take(sync)

    def _publish(self, sync: Sync, stock: _Stock) -> None:
        phase = "publishing"
        with _named(sync, phase), stock.buffer.writing(sync.version, sync.deadline.left(phase)) as snapshot:
            snapshot.notes["checksums"] = [pack_to_host(sync, *frame) for frame in stock.frames(snapshot)]
        sync.report.bytes_sent += sum(lane.nbytes for lane in stock.lanes)

    def _take(self, sync: Sync) -> None:
        with contextlib.ExitStack() as held:
            arrived = [
                (*frame, checksum)
                for source, stock in self._stocks.items()
                if any(self.link.rank in lane.destinations for lane in stock.lanes)
                for frame, checksum in self._acquired(sync, source, stock, held)
                if self.link.rank in frame[0].destinations
            ]
            for frame in arrived:
                sync.check(*frame)
            for frame in arrived:
                deliver_from_host(sync, *frame)

    def _acquired(self, sync: Sync, source: int, stock: _Stock, held: contextlib.ExitStack) -> list[tuple[_Frame, int]]:
        """The frames of a source's version, each with its checksum, as long as `held` is open."""
        phase = f"taking from {self.link.places[source].label}"
        with _named(sync, phase):
            snapshot = held.enter_context(stock.buffer.acquire(sync.version, sync.deadline.left(phase)))
        if snapshot.version != sync.version:
            raise sync.deadline.error(phase, f"it has gone on to version {snapshot.version}")
        return list(zip(stock.frames(snapshot), snapshot.notes["checksums"], strict=True))

    def close(self) -> None:
        for stock in self._stocks.values():
            stock.buffer.close()


def _aligned(bucket: Bucket) -> int:
    return -(-bucket.nbytes // _ALIGNMENT) * _ALIGNMENT


@contextlib.contextmanager
def _named(sync: Sync, phase: str) -> Iterator[None]:
    """Says of an error of the buffer which rank met it, and when."""
    try:
        yield
    except SnapshotError as error:
        raise sync.deadline.error(phase, str(error)) from error
