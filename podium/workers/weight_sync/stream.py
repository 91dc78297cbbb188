"""Who sends which rows: equal shares of one long stream of bytes, cut between rows."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from podium.workers.weight_sync.boxes import Span, itemsize, row_range, rows_of, volume


@dataclass(frozen=True)
class Flow:
    """A cell that every destination of a stream needs and every source of it holds, of each of `names`."""

    names: tuple[str, ...]
    span: Span
    dtype: str
    """On the wire."""

    @property
    def nbytes(self) -> int:
        return volume(self.span) * itemsize(self.dtype)


@dataclass(frozen=True)
class Part:
    """Some rows of one tensor's cell."""

    name: str
    span: Span
    dtype: str


class Meetings:
    """Which destinations each source sends to, over all streams so far; ranks are below `size`."""

    def __init__(self, size: int):
        self._size = size
        self._met: dict[int, list[np.ndarray]] = defaultdict(list)

    def add(self, source: int, destinations: np.ndarray) -> None:
        self._met[source].append(destinations)

    def partners(self, sources: np.ndarray) -> np.ndarray:
        """By rank, the position in `sources` of one that it meets; ``len(sources)`` where it meets none."""
        partner = np.full(self._size, len(sources))
        for index, source in enumerate(sources.tolist()):
            for destinations in self._met[source]:
                partner[destinations] = index
        return partner


@dataclass(eq=False)
class Stream:
    """Flows with the same sources and the same destinations.

    Laid end to end they are `width` bytes, wanted by each destination. The destinations' copies, laid end to end, are
    what the sources share, each a contiguous range of about equal size: so few pairs of ranks meet, and a pair at most
    once. A boundary between two sources falls between rows of a tensor. Copies are laid in the order of the sources
    that their destinations meet anyway, for other streams, so that the same pairs meet again.
    """

    sources: np.ndarray
    """Ranks, ascending."""
    destinations: np.ndarray
    """Ranks, ascending; none of them a source."""
    flows: list[Flow] = field(default_factory=list)

    def close(self, loads: np.ndarray, met: Meetings) -> None:
        """Divides the stream, topping up the sources that have least to send so far.

        Args:
            loads: bytes by rank; the shares are added.
            met: who met whom for earlier streams; these pairs are added.
        """
        self._bytes = np.array([flow.nbytes for flow in self.flows], dtype=np.int64)
        self._row_bytes = self._bytes // np.array([rows_of(flow.span) for flow in self.flows], dtype=np.int64)
        counts = np.array([len(flow.names) for flow in self.flows], dtype=np.int64)
        self._ends = np.cumsum(self._bytes * counts)
        self._begins = self._ends - self._bytes * counts
        self.width = int(self._ends[-1])
        shares = water_fill(loads[self.sources], self.width * len(self.destinations))
        self._bounds = self._cut(np.concatenate([[0], np.cumsum(shares)]))
        loads[self.sources] += self.sent
        self._copies = self._in_order_of(met)
        for index, first, last in zip(*self._met(), strict=True):
            met.add(int(self.sources[index]), self._copies[first : last + 1])

    def _in_order_of(self, met: Meetings) -> np.ndarray:
        """The destinations as their copies are laid."""
        if len(self.sources) == 1 or len(self.destinations) == 1:
            return self.destinations
        return self.destinations[np.argsort(met.partners(self.sources)[self.destinations], kind="stable")]

    def _met(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sources (by position) with something to send, and the first and last copies that each sends of."""
        starts, stops = self._bounds[:-1], self._bounds[1:]
        busy = np.flatnonzero(starts < stops)
        return busy, starts[busy] // self.width, (stops[busy] - 1) // self.width

    def _cut(self, positions: np.ndarray) -> np.ndarray:
        """Moves positions in the copies down to the nearest end of a row."""
        copy, within = np.divmod(positions, self.width)
        flow = np.searchsorted(self._ends, within, side="right")
        offset = (within - self._begins[flow]) % self._row_bytes[flow]
        return copy * self.width + within - offset

    @property
    def sent(self) -> np.ndarray:
        """Bytes that each of `sources` sends."""
        return np.diff(self._bounds)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Sources and destinations, as ranks, of every pair with something to send."""
        busy, first, last = self._met()
        counts = last - first + 1
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.sources[np.repeat(busy, counts)], self._copies[np.repeat(first, counts) + offsets]

    def sources_of(self, destination: int) -> Iterator[tuple[int, list[Part]]]:
        """What `destination` gets, source by source; nothing where it is not among the destinations."""
        if _index(self.destinations, destination) is None:
            return
        copy = int(np.flatnonzero(self._copies == destination)[0])
        begin, end = copy * self.width, (copy + 1) * self.width
        index = int(np.searchsorted(self._bounds, begin, side="right")) - 1
        while index < len(self.sources) and self._bounds[index] < end:
            low, high = max(int(self._bounds[index]), begin), min(int(self._bounds[index + 1]), end)
            if low < high:
                yield int(self.sources[index]), self._parts(low - begin, high - begin)
            index += 1

    def destinations_of(self, source: int) -> Iterator[tuple[int, list[Part]]]:
        """What `source` sends, destination by destination; nothing where it is not among the sources."""
        index = _index(self.sources, source)
        if index is None:
            return
        low, high = int(self._bounds[index]), int(self._bounds[index + 1])
        while low < high:
            copy = low // self.width
            begin = copy * self.width
            end = min(high, begin + self.width)
            yield int(self._copies[copy]), self._parts(low - begin, end - begin)
            low = end

    def _parts(self, low: int, high: int) -> list[Part]:
        """The rows between two positions of one copy."""
        parts = []
        while low < high:
            index = int(np.searchsorted(self._ends, low, side="right"))
            flow, size, row = self.flows[index], int(self._bytes[index]), int(self._row_bytes[index])
            number, offset = divmod(low - int(self._begins[index]), size)
            stop = min(offset + high - low, size)
            parts.append(Part(flow.names[number], row_range(flow.span, offset // row, stop // row), flow.dtype))
            low += stop - offset
        return parts


def water_fill(loads: np.ndarray, amount: int) -> np.ndarray:
    """Shares, summing to `amount`, that leave the largest of ``loads + shares`` as small as can be."""
    order = np.argsort(loads, kind="stable")
    ascending = loads[order]
    rising = np.arange(1, len(loads) + 1) * ascending - np.cumsum(ascending)  # to lift all lower ones to each level
    count = int(np.searchsorted(rising, amount, side="right"))
    level, rest = divmod(amount + int(ascending[:count].sum()), count)
    shares = np.zeros_like(loads)
    shares[order[:count]] = level + (np.arange(count) < rest) - ascending[:count]
    return shares


def _index(ranks: np.ndarray, rank: int) -> int | None:
    index = int(np.searchsorted(ranks, rank))
    return index if index < len(ranks) and ranks[index] == rank else None
