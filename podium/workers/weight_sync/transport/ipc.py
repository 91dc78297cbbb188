"""Actor and rollout are different processes on the same devices: buckets are handed over in shared memory."""

from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, ClassVar

import torch.distributed as dist

from podium.utils.errors import UserError
from podium.workers.weight_sync.lane import Lane, lanes_of
from podium.workers.weight_sync.transport.base import TRANSPORT_KEY, Deadline, Link, Place, Sync, Transport
from podium.workers.weight_sync.transport.channel import Channel, ChannelLost, Door, call_on
from podium.workers.weight_sync.transport.exchange import Frame, GroupCarrier
from podium.workers.weight_sync.transport.shared import SharedBuffer, attach, settle


class IPCTransport(Transport):
    """A source packs its buckets into memory that the destinations on its device read.

    What comes from a source on another device is received there by the destination's *host*: the source of that device
    (of several, one of them). A buffer is written again only when all its readers have said that they are done.
    """

    name: ClassVar[str] = "ipc"

    @classmethod
    def check(cls, places: Sequence[Place]) -> None:
        for place in places:
            if place.is_source and place.is_destination:
                raise UserError(f"{TRANSPORT_KEY}=ipc: {place.label} has both in one process; use colocated")
            if place.is_destination and not hosts(places, place):
                raise UserError(f"{TRANSPORT_KEY}=ipc: {place.label} shares its device with no actor; use broadcast")

    def connect(self) -> None:
        link = self.link
        self._side: _Sender | _Receiver = _Sender(link) if link.source is not None else _Receiver(link)

    def transfer(self, sync: Sync) -> None:
        try:
            self._side(sync)
        except ChannelLost as error:
            raise sync.deadline.error("hand-over", str(error)) from error

    def close(self) -> None:
        self._side.close()


class _Sender:
    """The actor's side: packs what it holds, receives what it hands over for sources on other devices."""

    def __init__(self, link: Link):
        deadline = Deadline(link.settings.timeout_s, -1, link.label)
        places, rank, size = link.places, link.rank, link.settings.bucket_bytes
        self._onward = [
            (lane, Frame(lane), to) for lane in link.lanes for to in _relays(places, lane) if lane.source == rank
        ]
        targets = [i for i, place in enumerate(places) if place.is_destination]
        served = {_key(lane): lane for i in targets for lane in lanes_of(link.plan, i, size)}
        readers = {key: _readers(places, lane, rank) for key, lane in served.items()}
        self._outboxes = {key: _Outbox(served[key]) for key, mine in readers.items() if mine}
        self._steps = max((len(lane.buckets) for lane in served.values()), default=0)
        self._carrier = GroupCarrier(link, _actor_group(link))
        door = Door(link)
        try:
            for _ in range(sum(len(mine) for mine in readers.values())):
                key, channel = door.let_in(deadline.left)
                self._outboxes[key].readers.append(channel)
        finally:
            door.close()
        for outbox in self._outboxes.values():
            outbox.offer()
        for outbox in self._outboxes.values():
            outbox.await_readers(deadline)
        self._own = [outbox for outbox in self._outboxes.values() if outbox.lane.source == rank]
        self._foreign = [outbox for outbox in self._outboxes.values() if outbox.lane.source != rank]

    def __call__(self, sync: Sync) -> None:
        for step in range(self._steps):
            arriving = [outbox for outbox in self._foreign if step < len(outbox.lane.buckets)]
            running = self._carrier.start(
                sync,
                [(outbox.free(sync, step).part(step), outbox.lane.source) for outbox in arriving],
                [(frame.pack(sync, step), to) for lane, frame, to in self._onward if step < len(lane.buckets)],
            )
            for outbox in self._own:
                if step < len(outbox.lane.buckets):
                    outbox.free(sync, step).pack(sync, step)
                    outbox.announce(sync, step)
            self._carrier.finish(sync, running)
            for outbox in arriving:
                outbox.announce(sync, step)
        for outbox in self._outboxes.values():
            outbox.end(sync)

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()
        self._carrier.close()


class _Outbox:
    """Two shared buffers for the buckets of a lane, and who reads them."""

    def __init__(self, lane: Lane):
        self.lane = lane
        self.readers: list[Channel] = []
        self._shared = [SharedBuffer(Frame.nbytes(lane)) for _ in lane.buckets[:2]]
        self._frames = [Frame(lane, shared.memory) for shared in self._shared]
        self._unread = 0  # first bucket that not all readers are done with

    def offer(self) -> None:
        """Tells the readers where the buffers are."""
        for reader in self.readers:
            reader.send([shared.handle for shared in self._shared])

    def await_readers(self, deadline: Deadline) -> None:
        """Waits until all have attached the buffers."""
        for reader in self.readers:
            reader.receive(deadline.left, f"waiting for {reader.label} to attach the buffers")
        for shared in self._shared:
            shared.unlink()

    def free(self, sync: Sync, step: int) -> Frame:
        """The buffer for a bucket, when all readers are done with the bucket before it there."""
        self._await(sync, step - len(self._frames))
        return self._frames[step % len(self._frames)]

    def announce(self, sync: Sync, step: int) -> None:
        """Tells the readers that a bucket is there."""
        settle()
        for reader in self.readers:
            reader.send(step)
        sync.report.bytes_sent += len(self.readers) * self.lane.buckets[step].nbytes

    def end(self, sync: Sync) -> None:
        """Waits until all has been read."""
        self._await(sync, len(self.lane.buckets) - 1)
        self._unread = 0

    def _await(self, sync: Sync, step: int) -> None:
        while self._unread <= step:
            for reader in self.readers:
                reader.receive(sync.deadline.left, f"waiting for {reader.label} to read a bucket")
            self._unread += 1

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        for shared in self._shared:
            shared.unlink()


class _Receiver:
    """The rollout's side: writes what it is told of to the engine, and says so."""

    def __init__(self, link: Link):
        deadline = Deadline(link.settings.timeout_s, -1, link.label)
        places, rank = link.places, link.rank
        self._lanes = {
            call_on(link, holder(places, lane.source, rank), _key(lane), deadline.left): lane for lane in link.lanes
        }
        self._frames: dict[Channel, list[Frame]] = {}
        for channel, lane in self._lanes.items():
            handles = channel.receive(deadline.left, f"waiting for the buffers of {channel.label}")
            self._frames[channel] = [Frame(lane, attach(handle)) for handle in handles]
            channel.send("attached")

    def __call__(self, sync: Sync) -> None:
        left = {channel: len(lane.buckets) for channel, lane in self._lanes.items()}
        while left:
            phase = f"waiting for buckets of {', '.join(sorted({channel.label for channel in left}))}"
            ends: dict[Any, Channel] = {channel.fileno(): channel for channel in left}
            for end in wait(list(ends), min(1.0, sync.deadline.left(phase))):
                channel = ends[end]
                step, frames = channel.receive(sync.deadline.left, phase), self._frames[channel]
                frames[step % len(frames)].deliver(sync, step)
                settle()
                channel.send(step)
                left[channel] -= 1
                if not left[channel]:
                    del left[channel]

    def close(self) -> None:
        for channel in self._lanes:
            channel.close()


def hosts(places: Sequence[Place], destination: Place) -> list[int]:
    """The sources on the destination's device."""
    return [i for i, place in enumerate(places) if place.is_source and place.shares_device(destination)]


def holder(places: Sequence[Place], source: int, destination: int) -> int:
    """Who hands over to `destination` what comes from `source`: itself, where it is on the same device."""
    near = hosts(places, places[destination])
    return source if source in near else near[destination % len(near)]


def _key(lane: Lane) -> tuple[int, tuple[int, ...]]:
    return lane.source, lane.destinations


def _relays(places: Sequence[Place], lane: Lane) -> list[int]:
    """Those to whom the source sends a lane, to be handed over there."""
    return sorted({holder(places, lane.source, to) for to in lane.destinations} - {lane.source})


def _readers(places: Sequence[Place], lane: Lane, rank: int) -> list[int]:
    """The destinations to which `rank` hands over a lane."""
    return [to for to in lane.destinations if holder(places, lane.source, to) == rank]


def _actor_group(link: Link) -> Any:
    """Of the actor's ranks, which have the first numbers; None where no bucket travels between them."""
    pairs = [(a, b) for a in link.places if a.is_source for b in link.places if b.is_destination]
    if all(a.shares_device(b) for a, b in pairs):
        return None
    return dist.new_group(timeout=timedelta(seconds=link.settings.timeout_s))
