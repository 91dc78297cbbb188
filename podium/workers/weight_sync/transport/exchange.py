"""Packed buckets between the ranks of a process group, double-buffered in both directions."""

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from podium.workers.weight_sync.lane import Bucket, Lane
from podium.workers.weight_sync.transport.base import Link, Sync, make_buffer

_CHECKSUM = 8  # bytes behind a bucket


class Frame:
    """Room for a bucket of a lane and its checksum."""

    def __init__(self, lane: Lane):
        self._lane = lane
        self._memory = make_buffer(max(map(_frame_bytes, lane.buckets)))

    def part(self, index: int) -> torch.Tensor:
        """What travels for a bucket: its bytes, and the checksum's behind them."""
        return self._memory[: _frame_bytes(self._lane.buckets[index])]

    def pack(self, sync: Sync, index: int) -> None:
        """Fills it from the trainer's memory."""
        frame = self.part(index)
        checksum = sync.pack(self._lane, index, frame)
        frame[-_CHECKSUM:].view(torch.int64).fill_(checksum - (1 << 64) if checksum >= 1 << 63 else checksum)

    def deliver(self, sync: Sync, index: int) -> None:
        """Writes it to the engine."""
        frame = self.part(index)
        sync.deliver(self._lane, index, frame, int(frame[-_CHECKSUM:].view(torch.int64)) % (1 << 64))


def _frame_bytes(bucket: Bucket) -> int:
    return math.ceil(bucket.nbytes / _CHECKSUM) * _CHECKSUM + _CHECKSUM


class Exchange:
    """Carries lanes from rank to rank: a bucket is packed while the one before it travels, and unpacked while the next
    arrives.

    Args:
        group: its ranks are the numbers of the link's processes.
    """

    def __init__(self, link: Link, group: Any):
        self._link, self._group = link, group
        self._sends = [(lane, _slots(lane)) for lane in link.lanes if lane.source == link.rank]
        self._receives = [(lane, _slots(lane)) for lane in link.lanes if lane.source != link.rank]
        self._steps = max((len(lane.buckets) for lane in link.lanes), default=0)

    def __call__(self, sync: Sync) -> None:
        """Carries one version.

        Raises:
            WeightSyncError: names the rank that did not answer, or whose bucket differs.
        """
        if self._steps:
            self._pack(sync, 0)
            works = self._start(sync, 0)
        sync.copy_local()  # while the first buckets travel
        for step in range(self._steps):
            self._pack(sync, step + 1)
            self._wait(sync, works)
            works = self._start(sync, step + 1)
            for lane, slots in self._receives:
                if step < len(lane.buckets):
                    slots[step % 2].deliver(sync, step)

    def _pack(self, sync: Sync, step: int) -> None:
        for lane, slots in self._sends:
            if step < len(lane.buckets):
                slots[step % 2].pack(sync, step)

    def _start(self, sync: Sync, step: int) -> list[tuple[str, Any]]:
        """Starts all that travels in one step; what is to be waited for, and how to call it."""
        ops, phases = [], []
        for lane, slots in self._receives:
            if step < len(lane.buckets):
                frame = slots[step % 2].part(step)
                ops.append(dist.P2POp(dist.irecv, frame, group=self._group, group_peer=lane.source))
                phases.append(f"bucket {step + 1} of {len(lane.buckets)} from {self._link.places[lane.source].label}")
        for lane, slots in self._sends:
            if step < len(lane.buckets):
                frame = slots[step % 2].part(step)
                for destination in lane.destinations:
                    ops.append(dist.P2POp(dist.isend, frame, group=self._group, group_peer=destination))
                    to = self._link.places[destination].label
                    phases.append(f"bucket {step + 1} of {len(lane.buckets)} to {to}")
                    sync.report.bytes_sent += len(frame)
        if not ops:
            return []
        works = dist.batch_isend_irecv(ops)
        # nccl makes one work of the batch.
        return list(zip(phases, works, strict=True)) if len(works) == len(phases) else [("; ".join(phases), works[0])]

    def _wait(self, sync: Sync, works: list[tuple[str, Any]]) -> None:
        for phase, work in works:
            left = timedelta(seconds=sync.deadline.left(phase))
            try:
                work.wait(left)
            except RuntimeError as error:
                raise sync.deadline.error(phase, str(error).splitlines()[0]) from error


def _slots(lane: Lane) -> list[Frame]:
    return [Frame(lane) for _ in lane.buckets[:2]]
