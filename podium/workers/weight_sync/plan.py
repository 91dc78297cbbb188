"""Which rows of which tensor travel from which rank to which, when weights change their layout.

A plan is pure data, made from the two layouts alone: every rank makes it for itself and gets the same one. It holds
streams between *sets* of ranks; only what one rank sends or receives is ever written out.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podium.utils.errors import UserError
from podium.workers.weight_sync.boxes import Box, Span, cells, volume, wire_dtype
from podium.workers.weight_sync.stream import Flow, Meetings, Part, Stream


@dataclass(frozen=True, eq=False)
class Holders:
    """Which ranks hold which boxes of a whole tensor. Tensors that are held alike share one object."""

    dtype: str
    spans: tuple[Span, ...]
    ranks: tuple[np.ndarray, ...]
    """The ranks that hold each span, ascending."""


@dataclass(frozen=True)
class Transfer:
    """Rows of one tensor in a message."""

    name: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    """The box, in the coordinates of the whole tensor; it lies inside one piece of either rank."""
    offset: int
    """Of its first element in the message; elements are in row-major order, without gaps."""
    numel: int


@dataclass(frozen=True)
class Message:
    """All that one rank sends to another in one dtype, as a flat buffer of `numel` elements."""

    source: int
    destination: int
    dtype: str
    """On the wire: the sender casts to it, the receiver casts from it where its own is wider."""
    numel: int
    transfers: tuple[Transfer, ...]


class ReshardPlan:
    """Every element of every destination, from exactly one source.

    An element that its destination rank holds as a source too stays where it is. The others come from the rank, among
    those that hold them, that has least to send; each pair of ranks exchanges at most one message a dtype.
    """

    def __init__(self, sources: Mapping[str, Holders], destinations: Mapping[str, Holders]):
        """Plans from who holds what of each tensor, by name.

        Raises:
            UserError: a destination wants what no source has: names the tensor and the box.
        """
        alike: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, wanted in destinations.items():
            if name not in sources:
                raise UserError(f"{name}: rank {wanted.ranks[0][0]} wants {_text(wanted.spans[0])}, no source has any")
            alike[id(sources[name]), id(wanted)].append(name)
        local, remote, sets = _Streams(), _Streams(), _RankSets()
        for names in alike.values():
            held, wanted = sources[names[0]], destinations[names[0]]
            dtype = wire_dtype(held.dtype, wanted.dtype)
            for target, ranks in zip(wanted.spans, wanted.ranks, strict=True):
                for span, indexes in cells(target, held.spans):
                    if not indexes:
                        text = f"{names[0]}: rank {ranks[0]} wants {_text(target)}, no source has {_text(span)}"
                        raise UserError(text)
                    holders = sets.union([held.ranks[index] for index in indexes])
                    own, others = sets.split(ranks, holders)
                    flow = Flow(tuple(names), span, dtype)
                    local.add(flow, own, own)
                    remote.add(flow, holders, others)
        self.local_streams = local.list()
        """What stays where it is: each destination is its own source."""
        self.streams = sorted(remote.list(), key=lambda stream: len(stream.sources))  # those with least choice first
        size = 1 + max((max(int(s.sources[-1]), int(s.destinations[-1])) for s in self.streams), default=0)
        loads, met = np.zeros(size, dtype=np.int64), Meetings(size)
        for stream in self.streams:
            stream.close(loads, met)

    @classmethod
    def from_pieces(
        cls, sources: Mapping[int, Sequence[Box]], destinations: Mapping[int, Sequence[Box]]
    ) -> "ReshardPlan":
        """Plans from the boxes on each rank, ranks of both sides numbered alike: equal numbers are one process.

        Raises:
            UserError: a destination wants what no source has, or ranks of a side hold a tensor in different dtypes.
            ValueError: boxes of a tensor overlap on one rank, so that a transfer could mean either of them.
        """
        return cls(_holders(sources), _holders(destinations))

    def sends(self, rank: int) -> list[Message]:
        """What `rank` sends to others, by destination and dtype."""
        parts: _Parts = defaultdict(list)
        for stream in self.streams:
            for destination, found in stream.destinations_of(rank):
                _sort_in(parts, rank, destination, found)
        return _messages(parts)

    def receives(self, rank: int) -> list[Message]:
        """What `rank` gets from others, by source and dtype; the same messages that the sources' `sends` give."""
        parts: _Parts = defaultdict(list)
        for stream in self.streams:
            for source, found in stream.sources_of(rank):
                _sort_in(parts, source, rank, found)
        return _messages(parts)

    def local(self, rank: int) -> list[Message]:
        """What `rank` copies from its own source boxes to its own destination boxes, one message a dtype."""
        parts: _Parts = defaultdict(list)
        for stream in self.local_streams:
            if rank in stream.destinations:
                for flow in stream.flows:
                    _sort_in(parts, rank, rank, [Part(name, flow.span, flow.dtype) for name in flow.names])
        return _messages(parts)


class _Streams:
    """Flows, gathered by the two sets of ranks (objects of `_RankSets`) that they connect."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Stream] = {}

    def add(self, flow: Flow, sources: np.ndarray, destinations: np.ndarray) -> None:
        if len(destinations):
            key = id(sources), id(destinations)
            self._found.setdefault(key, Stream(sources, destinations)).flows.append(flow)

    def list(self) -> list[Stream]:
        return list(self._found.values())


class _RankSets:
    """Sets of ranks, ascending, one object each: thousands of cells share them, so each is worked out once."""

    def __init__(self) -> None:
        self._sets: dict[bytes, np.ndarray] = {}
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._splits: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def union(self, sets: Sequence[np.ndarray]) -> np.ndarray:
        return self._one(sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets)))

    def split(self, ranks: np.ndarray, holders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of `ranks` that are among `holders`, and the others."""
        ranks = self._one(ranks)
        key = id(ranks), id(holders)
        if key not in self._splits:
            few, many = sorted((ranks, holders), key=len)
            shared = few[many[np.minimum(np.searchsorted(many, few), len(many) - 1)] == few]
            others = np.setdiff1d(ranks, shared, assume_unique=True) if len(shared) else ranks
            self._splits[key] = self._one(shared), self._one(others)
        return self._splits[key]

    def _one(self, ranks: np.ndarray) -> np.ndarray:
        if id(ranks) not in self._known:
            # The object itself is kept as well: its id must stay its own.
            self._known[id(ranks)] = ranks, self._sets.setdefault(ranks.tobytes(), ranks)
        return self._known[id(ranks)][1]


_Parts = dict[tuple[int, int, str], list[Part]]


def _sort_in(parts: _Parts, source: int, destination: int, found: Iterable[Part]) -> None:
    for part in found:
        parts[source, destination, part.dtype].append(part)


def _messages(parts: _Parts) -> list[Message]:
    messages = []
    for (source, destination, dtype), found in sorted(parts.items(), key=lambda entry: entry[0]):
        transfers, offset = [], 0
        for part in found:
            numel = volume(part.span)
            transfers.append(Transfer(part.name, *part.span, offset, numel))
            offset += numel
        messages.append(Message(source, destination, dtype, offset, tuple(transfers)))
    return messages


def _holders(pieces: Mapping[int, Sequence[Box]]) -> dict[str, Holders]:
    """Turns boxes by rank into ranks by box, one object for all tensors that are held alike."""
    ranks: dict[str, dict[Span, list[int]]] = defaultdict(lambda: defaultdict(list))
    dtypes: dict[str, tuple[str, int]] = {}
    for rank in sorted(pieces):
        for box in pieces[rank]:
            dtype, first = dtypes.setdefault(box.name, (box.dtype, rank))
            if dtype != box.dtype:
                raise UserError(f"{box.name}: rank {first} has it in {dtype}, rank {rank} in {box.dtype}")
            if volume(box.span):
                ranks[box.name][box.span].append(rank)
    alike: dict[tuple[str, tuple[Span, ...], tuple[tuple[int, ...], ...]], Holders] = {}
    result = {}
    for name, held in ranks.items():
        _check_apart(name, held)
        key = dtypes[name][0], tuple(held), tuple(tuple(found) for found in held.values())
        if key not in alike:
            alike[key] = Holders(key[0], key[1], tuple(np.array(found, dtype=np.int64) for found in key[2]))
        result[name] = alike[key]
    return result


def _check_apart(name: str, held: dict[Span, list[int]]) -> None:
    mine: dict[int, list[Span]] = defaultdict(list)
    for span, ranks in held.items():
        for rank in ranks:
            for other in mine[rank]:
                if all(max(a, c) < min(b, d) for a, b, c, d in zip(*span, *other, strict=True)):
                    raise ValueError(f"{name}: rank {rank} holds both {_text(other)} and {_text(span)}, which overlap")
            mine[rank].append(span)


def _text(span: Span) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(*span, strict=True)) + "]"
