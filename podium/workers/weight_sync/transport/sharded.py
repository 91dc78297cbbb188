"""Every rank that wants a tensor keeps an equal share of it; the shares are gathered when the weights are applied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from podium.workers.weight_sync.checksum import as_int64
from podium.workers.weight_sync.lane import Lane, lanes_with_local
from podium.workers.weight_sync.sharded_buffer import ShardedBuffer, share_width, shares_of
from podium.workers.weight_sync.transport.base import Place, Sync, Transport, WeightSyncError
from podium.workers.weight_sync.transport.host import HostGroups, deliver_from_host, pack_to_host, wait


@dataclass(frozen=True)
class _LaneEnd:
    """What this process has to do with a lane."""

    lane: Lane
    tag: int
    """Of the lane's first message."""
    shares: ShardedBuffer | None
    """Of its buckets, where this process is one of the destinations."""
    facts: torch.Tensor
    """(1 + buckets,) int64: the version of what the shares hold, and the checksum of each whole bucket."""


class ShardedTransport(Transport):
    """A source sends each byte once, to one of the ranks that want it; what those lack they get from each other.

    Shares lie in host memory, on each of n destinations 1/n of what all n want, and are complete before the first byte
    is written to an engine.
    """

    name: ClassVar[str] = "sharded"

    @classmethod
    def check(cls, places: Sequence[Place]) -> None:
        """Any processes will do."""

    def connect(self) -> None:
        link = self.link
        self._groups = HostGroups(link)
        self._all = self._groups(range(len(link.places)))
        self._ends: list[_LaneEnd] = []
        tag = 0
        for source in (rank for rank, place in enumerate(link.places) if place.is_source):
            for lane in lanes_with_local(link.plan, source, link.settings.bucket_bytes):
                if link.rank in (source, *lane.destinations):
                    self._ends.append(_LaneEnd(lane, tag, self._shares(lane), _no_facts(lane)))
                tag += len(lane.buckets) + 1

    def _shares(self, lane: Lane) -> ShardedBuffer | None:
        if self.link.rank not in lane.destinations:
            return None
        self._group(lane)
        sizes = [bucket.nbytes for bucket in lane.buckets]
        return ShardedBuffer(sizes, lane.destinations.index(self.link.rank), len(lane.destinations))

    def transfer(self, sync: Sync) -> None:
        try:
            self._scatter(sync)
            self._apply(sync)
        except WeightSyncError:
            raise
        except RuntimeError as error:
            raise sync.deadline.error("starting a message", str(error).splitlines()[0]) from error

    def _scatter(self, sync: Sync) -> None:
        """Brings every share, with the checksums of the whole buckets, to the rank that keeps it."""
        coming = [work for end in self._ends for work in self._receive(end)]
        for end in self._ends:
            if end.lane.source == self.link.rank:
                self._send(sync, end)
        for phase, work in coming:
            wait(sync, phase, work)
        for end in self._ends:
            if end.shares is not None and int(end.facts[0]) != sync.version:
                label = self.link.places[end.lane.source].label
                raise sync.deadline.error(f"a share from {label}", f"it is of version {int(end.facts[0])}")

    def _receive(self, end: _LaneEnd) -> list[tuple[str, Any]]:
        source = end.lane.source
        if end.shares is None or source == self.link.rank:
            return []
        phase = f"a share from {self.link.places[source].label}"
        memories = [end.shares.share(index) for index in range(len(end.lane.buckets))] + [end.facts]
        return [(phase, self._all.recv([memory], source, end.tag + i)) for i, memory in enumerate(memories)]

    def _send(self, sync: Sync, end: _LaneEnd) -> None:
        """Packs a bucket while the shares of the one before travel."""
        lane, count = end.lane, len(end.lane.destinations)
        widest = max(share_width(bucket.nbytes, count) for bucket in lane.buckets) * count
        slots = [torch.zeros(widest, dtype=torch.uint8) for _ in lane.buckets[:2]]
        end.facts[0] = sync.version
        going: list[list[tuple[str, Any]]] = [[] for _ in slots]
        for index, bucket in enumerate(lane.buckets):
            for phase, work in going[index % 2]:
                wait(sync, phase, work)
            whole = slots[index % 2][: share_width(bucket.nbytes, count) * count]
            end.facts[1 + index] = as_int64(pack_to_host(sync, lane, index, whole[: bucket.nbytes]))
            going[index % 2] = self._send_shares(sync, end, index, shares_of(whole, count))
        last = [
            (self._phase(to), self._all.send([end.facts], to, end.tag + len(lane.buckets)))
            for to in lane.destinations
            if to != self.link.rank
        ]
        for phase, work in [*(each for slot in going for each in slot), *last]:
            wait(sync, phase, work)

    def _send_shares(
        self, sync: Sync, end: _LaneEnd, index: int, shares: Sequence[torch.Tensor]
    ) -> list[tuple[str, Any]]:
        works = []
        for to, share in zip(end.lane.destinations, shares, strict=True):
            if to == self.link.rank:
                assert end.shares is not None
                end.shares.share(index).copy_(share)
            else:
                works.append((self._phase(to), self._all.send([share], to, end.tag + index)))
                sync.report.bytes_sent += len(share)
        return works

    def _phase(self, to: int) -> str:
        return f"a share to {self.link.places[to].label}"

    def _apply(self, sync: Sync) -> None:
        """Gathers bucket by bucket, the next one while one is written to the engine."""
        steps = [(end, i) for end in self._ends if end.shares is not None for i in range(len(end.lane.buckets))]
        started = [self._start(*step) for step in steps[:1]]
        for number, (end, index) in enumerate(steps):
            work, whole = started.pop()
            others = [self.link.places[rank].label for rank in end.lane.destinations if rank != self.link.rank]
            if work is not None:
                wait(sync, f"gathering shares with {', '.join(others)}", work)
            started += [self._start(*step) for step in steps[number + 1 : number + 2]]
            checksum = int(end.facts[1 + index]) % (1 << 64)
            deliver_from_host(sync, end.lane, index, whole, checksum)
            sync.report.bytes_sent += len(others) * share_width(end.lane.buckets[index].nbytes, len(others) + 1)

    def _start(self, end: _LaneEnd, index: int) -> tuple[Any, torch.Tensor]:
        assert end.shares is not None
        return end.shares.start_gather(index, self._group(end.lane))

    def _group(self, lane: Lane) -> Any | None:
        return self._groups(lane.destinations) if len(lane.destinations) > 1 else None

    def close(self) -> None:
        self._groups.close()


def _no_facts(lane: Lane) -> torch.Tensor:
    return torch.full((1 + len(lane.buckets),), -1, dtype=torch.int64)
