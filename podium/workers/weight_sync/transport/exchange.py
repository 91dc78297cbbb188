"""Packed buckets between the ranks of a process group, double-buffered in both directions."""

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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

    @staticmethod
    def nbytes(lane: Lane) -> int:
        """For the largest bucket of a lane."""
        return max(map(_frame_bytes, lane.buckets))

    def part(self, index: int) -> torch.Tensor:
        """What travels for a bucket: its bytes, and behind them those of its version and its checksum."""
        return self._memory[: _frame_bytes(self._lane.buckets[index])]

    def pack(self, sync: Sync, index: int) -> torch.Tensor:
        """Fills it from the trainer's memory; returns `part`."""
        frame = self.part(index)
        checksum = sync.pack(self._lane, index, frame)
        signed = checksum - (1 << 64) if checksum >= 1 << 63 else checksum
        frame[-_TRAILER:].view(torch.int64).copy_(torch.tensor([sync.version, signed]))
        return frame

    def deliver(self, sync: Sync, index: int) -> None:
        """Writes it to the engine.

        Raises:
            WeightSyncError: it is of another version; the engine does not hold what was sent.
        """
        frame = self.part(index)
        version, checksum = frame[-_TRAILER:].view(torch.int64).tolist()
        if version != sync.version:
            raise sync.deadline.error("receiving", f"a bucket of version {version} came")
        sync.deliver(self._lane, index, frame, checksum % (1 << 64))


def _frame_bytes(bucket: Bucket) -> int:
    return math.ceil(bucket.nbytes / _ALIGNMENT) * _ALIGNMENT + _TRAILER


class Carrier:
    """Point-to-point messages in a process group whose ranks are numbers of the link's processes."""

    def __init__(self, link: Link, group: Any):
        self._link, self._group = link, group
        self._running: list[tuple[str, Any]] = []

    def close(self) -> None:
        """Ends the group: others that still wait for this process hear of it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def start(
        self, sync: Sync, receives: list[tuple[torch.Tensor, int]], sends: list[tuple[torch.Tensor, int]]
    ) -> None:
        """Starts messages from and to processes, by number.

        Raises:
            WeightSyncError: one of them is gone.
        """
        ops = [dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=source) for buffer, source in receives]
        ops += [dist.P2POp(dist.isend, buffer, group=self._group, group_peer=peer) for buffer, peer in sends]
        phases = [f"receiving from {self._link.places[source].label}" for _, source in receives]
        phases += [f"sending to {self._link.places[peer].label}" for _, peer in sends]
        if not ops:
            return
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise sync.deadline.error(", ".join(phases), str(error).splitlines()[0]) from error
        # nccl makes one work of a batch.
        named = zip(phases, works, strict=True) if len(works) == len(phases) else [(", ".join(phases), works[0])]
        self._running += list(named)

    def finish(self, sync: Sync) -> None:
        """Waits for all that was started.

        Raises:
            WeightSyncError: names the process that was waited for.
        """
        running, self._running = self._running, []
        for phase, work in running:
            left = timedelta(seconds=sync.deadline.left(phase))
            try:
                work.wait(left)
            except RuntimeError as error:
                raise sync.deadline.error(phase, str(error).splitlines()[0]) from error


class Exchange:
    """Carries lanes from process to process: a bucket is packed while the one before it travels, and unpacked while the
    next arrives.

    Args:
        group: of all the link's processes, in the order of their numbers.
    """

    def __init__(self, link: Link, group: Any):
        self._carrier = Carrier(link, group)
        self._sends = [(lane, _slots(lane)) for lane in link.lanes if lane.source == link.rank]
        self._receives = [(lane, _slots(lane)) for lane in link.lanes if lane.source != link.rank]
        self._steps = max((len(lane.buckets) for lane in link.lanes), default=0)

    def close(self) -> None:
        self._carrier.close()

    def __call__(self, sync: Sync) -> None:
        """Carries one version.

        Raises:
            WeightSyncError: names the process that did not answer, or the tensors that differ.
        """
        packed = self._pack(sync, 0)
        self._start(sync, 0, packed)
        sync.copy_local()  # while the first buckets travel
        for step in range(self._steps):
            packed = self._pack(sync, step + 1)
            self._carrier.finish(sync)
            self._start(sync, step + 1, packed)
            for lane, slots in self._receives:
                if step < len(lane.buckets):
                    slots[step % 2].deliver(sync, step)

    def _pack(self, sync: Sync, step: int) -> list[tuple[torch.Tensor, int]]:
        """The buckets to be sent in a step, by destination."""
        packed = []
        for lane, slots in self._sends:
            if step < len(lane.buckets):
                frame = slots[step % 2].pack(sync, step)
                packed += [(frame, destination) for destination in lane.destinations]
        return packed

    def _start(self, sync: Sync, step: int, packed: list[tuple[torch.Tensor, int]]) -> None:
        expected = [
            (slots[step % 2].part(step), lane.source) for lane, slots in self._receives if step < len(lane.buckets)
        ]
        self._carrier.start(sync, expected, packed)
        sync.report.bytes_sent += sum(map(len, (frame for frame, _ in packed)))


def _slots(lane: Lane) -> list[Frame]:
    return [Frame(lane) for _ in lane.buckets[:2]]
