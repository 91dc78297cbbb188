"""What every transport is: one object in each process that takes part, made once and called once for each version."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from podium.utils.device import copy_bandwidth, device
from podium.utils.memory_buffer import FlatStage
from podium.utils.piece import Piece
from podium.workers.rollout.base import RolloutEngine
from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.checksum import combined, tensor_checksum
from podium.workers.weight_sync.lane import Bucket, Lane, Views, lanes_of, local_lanes
from podium.workers.weight_sync.plan import ReshardPlan

# "sample" checks every 8th bucket of a lane (of fewer, one), another eighth at each version.
_SAMPLE_STRIDE = 8


TRANSPORT_KEY = "actor_rollout_ref.rollout.weight_sync.transport"


class WeightSyncError(RuntimeError):
    """A version did not arrive, or not as it was sent."""


@dataclass(frozen=True)
class Place:
    """A process of a sync, and where it runs."""

    label: str
    """Its name in messages: ``actor rank 0``."""
    host: str
    """Alike for the processes of one machine, and for no others."""
    device: str
    """UUID of its GPU; ``cpu`` without one."""
    is_source: bool
    """It holds weights of the trainer."""
    is_destination: bool
    """It holds weights of the rollout."""
    pipeline: tuple[int, ...] = ()
    """Processes with the stages of its trainer's pipeline, in order, where stages lie in flat memory."""

    def shares_device(self, other: "Place") -> bool:
        """Whether memory can be handed from one to the other."""
        return (self.host, self.device) == (other.host, other.device)


@dataclass(frozen=True)
class SyncSettings:
    """How careful, in what portions, and how patient a sync is."""

    verify: str = "full"
    """``off``, ``sample`` or ``full``: which buckets are compared, bit for bit, with what generation then uses."""
    bucket_bytes: int = 32 << 20
    timeout_s: float = 300.0
    """Longest that a sync may take."""


@dataclass(frozen=True)
class Link:
    """What a process knows of the sync that it takes part in: as a source, as a destination, or as both.

    Processes are numbered from 0 as in the plan; one that is both has one number.
    """

    plan: ReshardPlan
    rank: int
    """Of this process."""
    places: Sequence[Place]
    """Of each process."""
    rendezvous: tuple[str, int]
    """Address of process 0 and a port that is free there: where processes that share nothing else meet."""
    secret: bytes
    """Known to these processes only."""
    settings: SyncSettings
    source: Callable[[], list[Piece]] | None = None
    """The trainer's memory; asked for at each sync, as an engine may move its parameters."""
    engine: RolloutEngine | None = None
    stage: Callable[[], FlatStage | None] | None = None
    """The trainer's flat memory, where it has such; asked for at each sync too."""

    @property
    def label(self) -> str:
        """This process in messages."""
        return self.places[self.rank].label

    @cached_property
    def lanes(self) -> list[Lane]:
        """Between this process and others, in an order that all processes share."""
        return lanes_of(self.plan, self.rank, self.settings.bucket_bytes)

    @cached_property
    def local(self) -> list[Lane]:
        """From the trainer to the engine of this process: one lane, or none."""
        return local_lanes(self.plan, self.rank, self.settings.bucket_bytes)


@dataclass
class SyncReport:
    """What one process did for one version."""

    version: int
    transport: str
    buckets: int = 0
    """Written to the engine."""
    bytes_sent: int = 0
    """That left this process."""
    bytes_received: int = 0
    """That came from other processes and were written to the engine."""
    bytes_local: int = 0
    """Copied from the trainer to the engine within this process."""
    seconds: float = 0.0
    """From the call to the new version, without verification."""
    bound_seconds: float = 0.0
    """Least for these bytes, each way at once, at the rate at which this process copies memory."""
    verified_buckets: int = 0
    verify_seconds: float = 0.0


class Deadline:
    """The time that a sync has left, and who is waiting."""

    def __init__(self, seconds: float, version: int, label: str):
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._version, self._label = version, label

    def left(self, phase: str) -> float:
        """Seconds, more than 0.

        Raises:
            WeightSyncError: there are none.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise self.error(phase, f"not done within {self._seconds:g} s")
        return left

    def error(self, phase: str, what: str) -> WeightSyncError:
        """Says who was doing what, and what became of it."""
        return WeightSyncError(f"weight sync {self._version}: {self._label}: {phase}: {what}")


class Sync:
    """One version on its way through one process: what `Transport.transfer` works with."""

    def __init__(self, link: Link, version: int, transport: str):
        self.link, self.version = link, version
        self.report = SyncReport(version, transport)
        self.deadline = Deadline(link.settings.timeout_s, version, link.label)
        self._scratch: torch.Tensor | None = None

    @cached_property
    def _source(self) -> Views:
        """Made when it is needed: what a process has to give may have to come to it first."""
        assert self.link.source is not None
        return Views(self.link.source())

    @cached_property
    def _destination(self) -> Views:
        assert self.link.engine is not None
        return Views(self.link.engine.pieces())

    def pack(self, lane: Lane, index: int, buffer: torch.Tensor) -> int:
        """Fills a buffer (uint8) with a bucket from the trainer's memory; returns its checksum.

        The checksum is 0 where the bucket is not verified at this version.
        """
        bucket = lane.buckets[index]
        bucket.pack(self._source, buffer)
        if not self.is_verified(index, len(lane.buckets)):
            return 0
        with self.verifying():
            return bucket.checksum(buffer)

    def check(self, lane: Lane, index: int, buffer: torch.Tensor, expected: int) -> None:
        """Compares a bucket that has arrived with the sender's checksum, before anything is written to the engine.

        Raises:
            WeightSyncError: they differ.
        """
        if not self.is_verified(index, len(lane.buckets)):
            return
        bucket = lane.buckets[index]
        with self.verifying():
            equal = bucket.checksum(buffer) == expected
        if not equal:
            raise self._differ("what arrived is not what was sent", bucket)

    def deliver(self, lane: Lane, index: int, buffer: torch.Tensor, expected: int) -> None:
        """Writes a bucket into the engine and compares what the engine then holds with the sender's checksum.

        Raises:
            WeightSyncError: they differ.
        """
        bucket = lane.buckets[index]
        assert self.link.engine is not None
        self.link.engine.overwrite()
        bucket.unpack(buffer, self._destination)
        self.report.buckets += 1
        self.report.bytes_received += bucket.nbytes
        if not self.is_verified(index, len(lane.buckets)):
            return
        with self.verifying():
            equal = self._checksum(bucket) == expected
        self._verified(bucket, equal)

    def lend(self, lane: Lane, index: int, buffer: torch.Tensor) -> tuple[list[torch.Tensor], int]:
        """A bucket's messages (uint8) for another process, and its checksum, 0 where it is not verified.

        What lies in the trainer's memory as it travels stays there; the rest is packed into `buffer`.
        """
        bucket, messages = lane.buckets[index], list[torch.Tensor]()
        for message, room in _rooms(bucket, buffer):
            lying = message.in_place(self._source)
            if lying is None:
                message.pack(self._source, room)
            messages.append(room if lying is None else lying)
        if not self.is_verified(index, len(lane.buckets)):
            return messages, 0
        with self.verifying():
            return messages, combined(map(tensor_checksum, messages))

    def expect(self, lane: Lane, index: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where the messages of `lend` are to be received: in the engine, where it holds them as they travel."""
        assert self.link.engine is not None
        self.link.engine.overwrite()
        places = list[torch.Tensor]()
        for message, room in _rooms(lane.buckets[index], buffer):
            lying = message.in_place(self._destination)
            places.append(room if lying is None else lying)
        return places

    def settle(
        self, lane: Lane, index: int, buffer: torch.Tensor, places: Sequence[torch.Tensor], expected: int
    ) -> None:
        """Writes what has arrived in `buffer` into the engine, and compares what that holds with the sender's checksum.

        Args:
            places: from `expect`.

        Raises:
            WeightSyncError: they differ.
        """
        bucket, is_verified, checksums = lane.buckets[index], self.is_verified(index, len(lane.buckets)), list[int]()
        for (message, room), place in zip(_rooms(bucket, buffer), places, strict=True):
            is_there = place.data_ptr() != room.data_ptr()
            if not is_there:
                message.unpack(room, self._destination)
            if is_verified:
                with self.verifying():
                    checksums.append(tensor_checksum(place) if is_there else self._checksum(message))
        self.report.buckets += 1
        self.report.bytes_received += bucket.nbytes
        if is_verified:
            self._verified(bucket, combined(checksums) == expected)

    def copy(self, lane: Lane, index: int) -> None:
        """Moves a bucket from the trainer to the engine of this process.

        Raises:
            WeightSyncError: the engine then does not hold the trainer's bits.
        """
        bucket = lane.buckets[index]
        assert self.link.engine is not None
        self.link.engine.overwrite()
        bucket.copy(self._source, self._destination)
        self.report.buckets += 1
        self.report.bytes_local += bucket.nbytes
        if not self.is_verified(index, len(lane.buckets)):
            return
        with self.verifying():
            equal = bucket.equal(self._source, self._destination)
        self._verified(bucket, equal)

    def copy_local(self) -> None:
        """Copies all that stays in this process."""
        for lane in self.link.local:
            for index in range(len(lane.buckets)):
                self.copy(lane, index)

    def _checksum(self, bucket: Bucket) -> int:
        """Of what the engine holds."""
        if self._scratch is None or len(self._scratch) < bucket.nbytes:
            self._scratch = make_buffer(bucket.nbytes)
        bucket.pack(self._destination, self._scratch)
        return bucket.checksum(self._scratch)

    def is_verified(self, index: int, count: int) -> bool:
        """Whether number `index` of a row of `count` buckets is compared at this version."""
        verify, stride = self.link.settings.verify, min(_SAMPLE_STRIDE, count)
        return verify == "full" or (verify == "sample" and (index + self.version) % stride == 0)

    def _verified(self, bucket: Bucket, equal: bool) -> None:
        self.report.verified_buckets += 1
        if not equal:
            raise self._differ("the rollout does not hold the bits that were sent", bucket)

    def _differ(self, what: str, bucket: Bucket) -> WeightSyncError:
        names = list(dict.fromkeys(part.name for part in bucket.parts))
        some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return self.deadline.error("verification", f"{what}, of {some}")

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Counts the time of a ``with`` block as that of verification."""
        began = time.perf_counter()
        yield
        self.report.verify_seconds += time.perf_counter() - began


class Transport(ABC):
    """Moves versions over a link.

    `sync` is called in every process of the link for the same version, and returns when this process has done its
    part: a destination then generates with the new version. Where it raises, a destination that nothing was written to
    still has its old version, and any other refuses to generate.

    What is kept from sync to sync (buffers, process groups) is set up in `connect`, which every process of the link
    calls together, and freed in `close`.
    """

    name: ClassVar[str]

    def __init__(self, link: Link):
        self.link = link
        self._bandwidth = copy_bandwidth()

    @classmethod
    @abstractmethod
    def check(cls, places: Sequence[Place]) -> None:
        """Refuses processes that it cannot connect.

        Raises:
            UserError: says what it needs.
        """

    @classmethod
    def held(cls, places: Sequence[Place], boxes: Sequence[Sequence[Box]]) -> list[Sequence[Box]]:
        """What each process has of the trainer's weights when it starts to copy and send them, for the plan.

        Args:
            boxes: what its trainer holds.
        """
        return list(boxes)

    @abstractmethod
    def connect(self) -> None:
        """Allocates buffers and meets the other processes."""

    @abstractmethod
    def transfer(self, sync: Sync) -> None:
        """Sends what this process has to send and delivers what it has to receive.

        Raises:
            WeightSyncError: with the rank and the phase, made by `sync.deadline.error`.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what `connect` allocated."""

    def sync(self, version: int) -> SyncReport:
        """Sends and receives `version`.

        Raises:
            ValueError: the engine has that version or a newer one.
            RuntimeError: the engine is generating.
            WeightSyncError: the version did not arrive as it was sent.
        """
        began, engine = time.perf_counter(), self.link.engine
        sync = Sync(self.link, version, self.name)
        if engine is not None:
            engine.begin_update(version)
        self.transfer(sync)
        if engine is not None:
            engine.finish_update(version)
        report = sync.report
        report.seconds = time.perf_counter() - began - report.verify_seconds
        moved = report.bytes_local + max(report.bytes_sent, report.bytes_received)
        report.bound_seconds = moved / self._bandwidth
        return report


def _rooms(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """The messages of a bucket, and for each its part of a buffer of at least the bucket's size."""
    start = 0
    for message in bucket.messages:
        yield message, buffer[start : start + message.nbytes]
        start += message.nbytes


def make_buffer(nbytes: int) -> torch.Tensor:
    """Bytes on this rank's device, uninitialised."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device())
