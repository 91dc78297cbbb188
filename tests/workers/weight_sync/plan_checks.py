"""Plans executed on numpy arrays, each side from its own view of them."""

import itertools
import math

import numpy as np

from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.plan import Holders, Message, ReshardPlan, Transfer

Pieces = dict[int, list[Box]]


def whole(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """What `box` holds of a tensor of numbers that occur nowhere else in it, nor in one of another name."""
    numbers = np.arange(math.prod(shape)).reshape(shape) + sum(box.name.encode()) * 1_000_003
    return numbers[(*(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True)), ...)]


class Memory:
    """What a rank has for its boxes; a transfer means the one box of its tensor that it lies inside."""

    def __init__(self, boxes: list[Box], arrays: list[np.ndarray]):
        self.boxes, self.arrays = boxes, arrays
        self._of: dict[str, list[int]] = {}
        for index, box in enumerate(boxes):
            self._of.setdefault(box.name, []).append(index)

    def view(self, transfer: Transfer) -> np.ndarray:
        found = []
        for index in self._of[transfer.name]:
            starts, array = self.boxes[index].starts, self.arrays[index]
            at = [slice(a - c, b - c) for a, b, c in zip(transfer.starts, transfer.stops, starts, strict=True)]
            if all(s.start >= 0 and s.stop <= n for s, n in zip(at, array.shape, strict=True)):
                found.append(array[(*at, ...)])
        (view,) = found
        return view


def run(plan: ReshardPlan, sources: Pieces, destinations: Pieces, shapes: dict[str, tuple[int, ...]]) -> None:
    """Executes a plan on numpy arrays, each side from its own view of it, and checks what arrives and how often."""
    memory = {rank: Memory(boxes, [whole(b, shapes[b.name]) for b in boxes]) for rank, boxes in sources.items()}
    empty = {rank: [np.zeros_like(whole(b, shapes[b.name])) for b in boxes] for rank, boxes in destinations.items()}
    filled = {rank: Memory(boxes, empty[rank]) for rank, boxes in destinations.items()}
    writes = {rank: Memory(boxes, [array.copy() for array in empty[rank]]) for rank, boxes in destinations.items()}
    wire: dict[tuple[int, int, str], np.ndarray] = {}

    def pack(message: Message) -> np.ndarray:
        parts = [memory[message.source].view(transfer).reshape(-1) for transfer in message.transfers]
        sizes = [part.size for part in parts]
        assert [transfer.offset for transfer in message.transfers] == list(itertools.accumulate([0, *sizes[:-1]]))
        assert message.numel == sum(sizes)
        return np.concatenate(parts)

    def unpack(message: Message, buffer: np.ndarray) -> None:
        for transfer in message.transfers:
            view = filled[message.destination].view(transfer)
            view[...] = buffer[transfer.offset : transfer.offset + transfer.numel].reshape(view.shape)
            writes[message.destination].view(transfer)[...] += 1

    for rank in sources:
        for message in plan.sends(rank):
            assert message.source == rank != message.destination
            wire[rank, message.destination, message.dtype] = pack(message)
        for message in plan.local(rank):
            unpack(message, pack(message))
    for rank in destinations:
        for message in plan.receives(rank):
            assert message.destination == rank != message.source
            unpack(message, wire.pop((message.source, rank, message.dtype)))
    assert not wire, "messages that nobody expects"
    for rank, boxes in destinations.items():
        for box, array, count in zip(boxes, filled[rank].arrays, writes[rank].arrays, strict=True):
            assert (count == 1).all(), f"{box} on {rank}: written {count.min()} to {count.max()} times"
            assert (array == whole(box, shapes[box.name])).all(), f"{box} on {rank}"


def points(box: Box | Transfer) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.starts, box.stops, strict=True))))


def pieces_of(table: dict[str, Holders]) -> Pieces:
    """Boxes by rank, written out."""
    pieces: Pieces = {}
    for name, holders in table.items():
        for (starts, stops), ranks in zip(holders.spans, holders.ranks, strict=True):
            for rank in ranks.tolist():
                pieces.setdefault(rank, []).append(Box(name, starts, stops, holders.dtype))
    return pieces
