"""Buckets between the ranks of a process group, double-buffered in both directions."""

import math
from datetime import timedelta
from itertools import product
from typing import Any, Protocol

import torch
import torch.distributed as dist

from podium.utils.device import device
from podium.workers.weight_sync.checksum import as_int64
from podium.workers.weight_sync.lane import Bucket, Lane
from podium.workers.weight_sync.transport.base import Link, Sync, make_buffer

_ALIGNMENT = 8
_TRAILER = 16  # bytes behind a bucket: its version and its checksum, int64


class Frame:
    """Room for a bucket of a lane, its version and its checksum.

    Args:
        memory: uint8, `Frame.nbytes` of the lane; None allocates it.
    """

    def __init__(self, lane: Lane, memory: torch.Tensor | None = None):
        self._lane = lane
        self._memory = make_buffer(self.nbytes(lane)) if memory is None else memory
        self._places: list[torch.Tensor] = []

    @staticmethod
    def nbytes(lane: Lane) -> int:
        """For the largest bucket of a lane."""
        return max(map(_frame_bytes, lane.buckets))

    def part(self, index: int) -> torch.Tensor:
        """What travels for a bucket: its bytes, and behind them those of its version and its checksum."""
        return self._memory[: _frame_bytes(self._lane.buckets[index])]

    def pack(self, sync: Sync, index: int) -> torch.Tensor:
        """Fills it from the trainer's memory; returns `part`."""
        self._sign(index, sync.version, sync.pack(self._lane, index, self.part(index)))
        return self.part(index)

    def deliver(self, sync: Sync, index: int) -> None:
        """Writes it to the engine.

        Raises:
            WeightSyncError: it is of another version; the engine does not hold what was sent.
        """
        sync.deliver(self._lane, index, self.part(index), self._signed(sync, index))

    def lend(self, sync: Sync, index: int) -> list[torch.Tensor]:
        """A bucket as messages for another process: what need not be packed for it comes from the trainer's memory."""
        messages, checksum = sync.lend(self._lane, index, self.part(index))
        self._sign(index, sync.version, checksum)
        return self._with_signature(index, messages)

    def expect(self, sync: Sync, index: int) -> list[torch.Tensor]:
        """Where such messages are to be received."""
        self._places = sync.expect(self._lane, index, self.part(index))
        return self._with_signature(index, self._places)

    def settle(self, sync: Sync, index: int) -> None:
        """Writes to the engine what was not received there.

        Raises:
            WeightSyncError: it is of another version; the engine does not hold what was sent.
        """
        places, self._places = self._places, []
        sync.settle(self._lane, index, self.part(index), places, self._signed(sync, index))

    def _with_signature(self, index: int, messages: list[torch.Tensor]) -> list[torch.Tensor]:
        """The last message is the rest of the bucket, which lies before the signature."""
        part = self.part(index)
        rest = self._lane.buckets[index].nbytes - len(messages[-1])
        return [*messages[:-1], part[rest:]]

    def _sign(self, index: int, version: int, checksum: int) -> None:
        self.part(index)[-_TRAILER:].view(torch.int64).copy_(torch.tensor([version, as_int64(checksum)]))

    def _signed(self, sync: Sync, index: int) -> int:
        """The checksum that came with a bucket of this version."""
        version, checksum = self.part(index)[-_TRAILER:].view(torch.int64).tolist()
        if version != sync.version:
            raise sync.deadline.error("receiving", f"a bucket of version {version} came")
        return int(checksum % (1 << 64))


def _frame_bytes(bucket: Bucket) -> int:
    return math.ceil(bucket.nbytes / _ALIGNMENT) * _ALIGNMENT + _TRAILER


class Carrier(Protocol):
    """Point-to-point messages between the link's processes, by number; those of a pair arrive in order."""

    def start(self, sync: Sync, receives: list[tuple[torch.Tensor, int]], sends: list[tuple[torch.Tensor, int]]) -> Any:
        """Starts messages (uint8 or int64, flat) from and to processes; returns what `finish` takes.

        Raises:
            WeightSyncError: one of them is gone.
        """

    def finish(self, sync: Sync, running: Any) -> None:
        """Waits for messages that were started.

        Raises:
            WeightSyncError: names the processes that were waited for.
        """

    def close(self) -> None:
        """Others that still wait for this process hear that it is gone."""


Running = list[tuple[str, Any]]
"""Messages under way: for each, the phase that it is in errors, and what to wait for."""


class GroupCarrier:
    """A `Carrier` in a process group.

    Args:
        group: of all the link's processes, in the order of their numbers; None where there is nothing to carry.
    """

    def __init__(self, link: Link, group: Any):
        self._link, self._group = link, group

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def start(
        self, sync: Sync, receives: list[tuple[torch.Tensor, int]], sends: list[tuple[torch.Tensor, int]]
    ) -> Running:
        ops = [dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=source) for buffer, source in receives]
        ops += [dist.P2POp(dist.isend, buffer, group=self._group, group_peer=peer) for buffer, peer in sends]
        phases = [f"receiving from {self._link.places[source].label}" for _, source in receives]
        phases += [f"sending to {self._link.places[peer].label}" for _, peer in sends]
        if not ops:
            return []
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise sync.deadline.error(", ".join(phases), str(error).splitlines()[0]) from error
        # nccl makes one work of a batch.
        return list(zip(phases, works, strict=True)) if len(works) == len(phases) else [(", ".join(phases), works[0])]

    def finish(self, sync: Sync, running: Running) -> None:
        # Those of a pair arrive in order: whoever waits for the last is woken once, not for each, while both processes
        # have bytes to copy.
        for phase, work in reversed(running):
            left = timedelta(seconds=sync.deadline.left(phase))
            try:
                work.wait(left)
            except RuntimeError as error:
                raise sync.deadline.error(phase, str(error).splitlines()[0]) from error


class Exchange:
    """Carries lanes from process to process.

    A large part of a tensor that lies in memory as it travels is sent from there, and received there. The rest is
    packed while the bucket before it travels, and unpacked while the next arrives. A bucket is started before the one
    ahead of it has arrived, so that the processes never wait for each other with nothing under way.
    """

    def __init__(self, link: Link, carrier: Carrier):
        self._link, self._carrier = link, carrier
        self._sends = [(lane, _slots(lane)) for lane in link.lanes if lane.source == link.rank]
        self._receives = [(lane, _slots(lane)) for lane in link.lanes if lane.source != link.rank]
        self._steps = max((len(lane.buckets) for lane in link.lanes), default=0)

    def close(self) -> None:
        self._carrier.close()

    def __call__(self, sync: Sync) -> None:
        """Carries one version.

        Raises:
            WeightSyncError: names the process that did not answer or has another version, or the tensors that differ.
        """
        self._agree(sync)
        running = self._start(sync, 0)
        sync.copy_local()  # while the first buckets travel
        for step in range(self._steps):
            # Its slots are free: the bucket that was in them, two steps back, has been sent, and written to the engine.
            following = self._start(sync, step + 1)
            self._carrier.finish(sync, running)
            for lane, slots in self._receives:
                if step < len(lane.buckets):
                    slots[step % 2].settle(sync, step)
            running = following

    def _agree(self, sync: Sync) -> None:
        """Makes sure, before anything is written to the engine, that all who send to it send this version."""
        sent = torch.tensor([sync.version], device=device())
        coming = {lane.source: torch.empty_like(sent) for lane, _ in self._receives}
        peers = dict.fromkeys(peer for lane, _ in self._sends for peer in lane.destinations)
        receives, sends = [(come, source) for source, come in coming.items()], [(sent, peer) for peer in peers]
        self._carrier.finish(sync, self._carrier.start(sync, receives, sends))
        for source, come in coming.items():
            if int(come) != sync.version:
                label = self._link.places[source].label
                raise sync.deadline.error(f"receiving from {label}", f"it sends version {int(come)}")

    def _start(self, sync: Sync, step: int) -> Any:
        lent = [
            (message, destination)
            for lane, slots in self._sends
            if step < len(lane.buckets)
            for message, destination in product(slots[step % 2].lend(sync, step), lane.destinations)
        ]
        expected = [
            (message, lane.source)
            for lane, slots in self._receives
            if step < len(lane.buckets)
            for message in slots[step % 2].expect(sync, step)
        ]
        sync.report.bytes_sent += sum(len(message) for message, _ in lent)
        return self._carrier.start(sync, expected, lent)


def _slots(lane: Lane) -> list[Frame]:
    return [Frame(lane) for _ in lane.buckets[:2]]
