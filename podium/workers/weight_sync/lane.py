"""What travels: the rows of a plan's messages, packed into flat buckets on one side and unpacked on the other."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from podium.utils.piece import Piece
from podium.workers.weight_sync.boxes import itemsize, row_range, rows_of, volume
from podium.workers.weight_sync.checksum import same_bits, tensor_checksum
from podium.workers.weight_sync.plan import Message, ReshardPlan
from podium.workers.weight_sync.stream import Part

_ALONE = 128 << 10
"""Bytes of a part from which on it is worth a message of its own: then it need not be packed."""


_SHARES = 4
_SMALLEST = 4 << 20
"""Bytes: less is not worth another message."""


class Views:
    """A rank's memory, addressed by boxes of whole tensors."""

    def __init__(self, pieces: Iterable[Piece]):
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.name].append(piece)

    def __call__(self, part: Part) -> torch.Tensor:
        """The view of `part`, which lies within one piece."""
        starts, stops = part.span
        for piece in self._pieces[part.name]:
            if part.span == (piece.starts, piece.stops):
                return piece.tensor
            inside = all(a >= b for a, b in zip(starts, piece.starts, strict=True))
            if inside and all(a <= b for a, b in zip(stops, piece.stops, strict=True)):
                view = piece.tensor
                for axis, (start, stop, origin) in enumerate(zip(starts, stops, piece.starts, strict=True)):
                    view = view.narrow(axis, start - origin, stop - start)
                return view
        raise KeyError(f"{part.name}: no piece of this rank holds {starts}..{stops}")


@dataclass(frozen=True)
class Bucket:
    """Rows of tensors that travel together, one after the other, in one precision."""

    dtype: torch.dtype
    parts: tuple[Part, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each part."""
        return [volume(part.span) for part in self.parts]

    @cached_property
    def nbytes(self) -> int:
        return sum(self.sizes) * self.dtype.itemsize

    @cached_property
    def messages(self) -> tuple["Bucket", ...]:
        """The same rows as messages: each large part by itself, and then the others (perhaps none) together."""
        large = [size * self.dtype.itemsize >= _ALONE for size in self.sizes]
        alone = [Bucket(self.dtype, (part,)) for part, is_large in zip(self.parts, large, strict=True) if is_large]
        others = tuple(part for part, is_large in zip(self.parts, large, strict=True) if not is_large)
        return (*alone, Bucket(self.dtype, others))

    def in_place(self, views: Views) -> torch.Tensor | None:
        """The bytes (uint8) of a large part that lies as it travels in a rank's memory; None of anything else."""
        if len(self.parts) != 1 or self.nbytes < _ALONE:
            return None
        view = views(self.parts[0])
        return view.flatten().view(torch.uint8) if view.is_contiguous() and view.dtype == self.dtype else None

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements that lie in a uint8 buffer of at least `nbytes`."""
        return buffer[: self.nbytes].view(self.dtype)

    def pack(self, views: Views, buffer: torch.Tensor) -> None:
        """Copies (and casts) from a rank's memory into a buffer."""
        _copy(self._segments(buffer), [views(part) for part in self.parts])

    def unpack(self, buffer: torch.Tensor, views: Views) -> None:
        """Copies a buffer into a rank's memory."""
        _copy([views(part) for part in self.parts], self._segments(buffer))

    def copy(self, source: Views, destination: Views) -> None:
        """Copies from one memory to the other, without a buffer."""
        _copy([destination(part) for part in self.parts], [source(part) for part in self.parts])

    def equal(self, source: Views, destination: Views) -> bool:
        """Whether the two hold the same bits."""
        return all(same_bits(source(part).to(self.dtype), destination(part).to(self.dtype)) for part in self.parts)

    def checksum(self, buffer: torch.Tensor) -> int:
        """Of the bits of a packed buffer."""
        return tensor_checksum(self.flat(buffer))

    def _segments(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        segments = self.flat(buffer).split_with_sizes(self.sizes)
        return [
            segment.view([stop - start for start, stop in zip(*part.span, strict=True)])
            for segment, part in zip(segments, self.parts, strict=True)
        ]


@torch.no_grad()
def _copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    if not to:
        return
    # One call: a call for each would cost more than a small tensor's bytes.
    torch._foreach_copy_(list(to), list(source))


@dataclass(frozen=True)
class Lane:
    """All that one rank sends to the same other ranks, as a row of buckets: each goes to all of `destinations`.

    Every process makes the lanes from the same plan, so no bucket says what is in it.
    """

    source: int
    destinations: tuple[int, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def nbytes(self) -> int:
        """To each destination."""
        return sum(bucket.nbytes for bucket in self.buckets)


def local_lanes(plan: ReshardPlan, rank: int, bucket_bytes: int) -> list[Lane]:
    """What `rank` copies from its own source memory to its own destination memory: one lane, or none."""
    messages = plan.local(rank)
    return [Lane(rank, (rank,), tuple(_buckets(messages, bucket_bytes)))] if messages else []


def lanes_from(plan: ReshardPlan, source: int, bucket_bytes: int) -> list[Lane]:
    """What `source` sends to others, by destinations; those that get the same share a lane."""
    by_destination: dict[int, list[Message]] = defaultdict(list)
    for message in plan.sends(source):
        by_destination[message.destination].append(message)
    alike: dict[tuple[tuple[str, object], ...], list[int]] = defaultdict(list)
    for destination, messages in by_destination.items():
        alike[tuple((message.dtype, message.transfers) for message in messages)].append(destination)
    return [
        Lane(source, tuple(destinations), tuple(_buckets(by_destination[destinations[0]], bucket_bytes)))
        for destinations in alike.values()
    ]


def lanes_with_local(plan: ReshardPlan, source: int, bucket_bytes: int) -> list[Lane]:
    """All that `source` has to give, to others and to its own process, which shares a lane where it gets the same."""
    destinations: dict[tuple[Bucket, ...], list[int]] = defaultdict(list)
    for lane in (*local_lanes(plan, source, bucket_bytes), *lanes_from(plan, source, bucket_bytes)):
        destinations[lane.buckets] += lane.destinations
    return [Lane(source, tuple(sorted(ranks)), buckets) for buckets, ranks in destinations.items()]


def lanes_of(plan: ReshardPlan, rank: int, bucket_bytes: int) -> list[Lane]:
    """The lanes between `rank` and others, by source and destinations: in the same order wherever two are seen."""
    sources = {message.source for message in plan.receives(rank)}
    lanes = [lane for source in sources for lane in lanes_from(plan, source, bucket_bytes) if rank in lane.destinations]
    lanes += lanes_from(plan, rank, bucket_bytes)
    return sorted(lanes, key=lambda lane: (lane.source, lane.destinations))


def _buckets(messages: Sequence[Message], bucket_bytes: int) -> Iterator[Bucket]:
    """Consecutive rows of at most `bucket_bytes`; a single row that is longer is a bucket of its own.

    What is not much more than a bucket is cut in `_SHARES`, so that one end packs while the other unpacks.
    """
    bucket_bytes = min(bucket_bytes, max(sum(m.numel * itemsize(m.dtype) for m in messages) // _SHARES, _SMALLEST))
    for message in messages:
        dtype, held, size = getattr(torch, message.dtype), list[Part](), 0
        for transfer in message.transfers:
            whole = Part(transfer.name, (transfer.starts, transfer.stops), message.dtype)
            for part in _portions(whole, bucket_bytes):
                nbytes = volume(part.span) * dtype.itemsize
                if held and size + nbytes > bucket_bytes:
                    yield Bucket(dtype, tuple(held))
                    held, size = [], 0
                held.append(part)
                size += nbytes
        yield Bucket(dtype, tuple(held))


def _portions(part: Part, nbytes: int) -> Iterator[Part]:
    rows = rows_of(part.span)
    most = max(1, nbytes * rows // max(1, volume(part.span) * itemsize(part.dtype)))
    for first in range(0, rows, most):
        yield Part(part.name, row_range(part.span, first, min(first + most, rows)), part.dtype)
