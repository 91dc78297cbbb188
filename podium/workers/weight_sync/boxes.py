"""Boxes of whole tensors, as plain numbers: where two layouts meet."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from podium.utils.errors import UserError

if TYPE_CHECKING:
    from podium.utils.piece import Piece

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Starts and stops of a box, a dimension each."""

_ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class Box:
    """A box of a whole Hugging Face tensor in some rank's memory: a `Piece` without the memory."""

    name: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    dtype: str
    """torch's name without ``torch.``, as in ``bfloat16``."""

    @classmethod
    def of(cls, piece: "Piece") -> "Box":
        """What can be sent to other ranks of `piece`."""
        return cls(piece.name, piece.starts, piece.stops, str(piece.tensor.dtype).removeprefix("torch."))

    @property
    def span(self) -> Span:
        return self.starts, self.stops


def itemsize(dtype: str) -> int:
    """Bytes of an element.

    Raises:
        UserError: a dtype that cannot be sent.
    """
    if dtype not in _ITEMSIZE:
        raise UserError(f"dtype {dtype!r}: expected one of {', '.join(_ITEMSIZE)}")
    return _ITEMSIZE[dtype]


def wire_dtype(source: str, destination: str) -> str:
    """The narrower of the two, the destination's where they are equally wide: casts down happen before sending."""
    return source if itemsize(source) < itemsize(destination) else destination


def volume(span: Span) -> int:
    """Elements of a box; 1 for a box of a scalar, 0 for an empty one."""
    return math.prod(max(0, stop - start) for start, stop in zip(*span, strict=True))


def split_axis(span: Span) -> int | None:
    """The dimension along which a box is cut into rows: the first that is longer than 1."""
    return next((axis for axis, (start, stop) in enumerate(zip(*span, strict=True)) if stop - start > 1), None)


def rows_of(span: Span) -> int:
    """Into how many parts a box can be cut along its `split_axis`."""
    axis = split_axis(span)
    return 1 if axis is None else span[1][axis] - span[0][axis]


def row_range(span: Span, first: int, last: int) -> Span:
    """Rows ``[first, last)`` of a box, counted from its start."""
    axis = split_axis(span)
    if axis is None:
        return span
    starts, stops = list(span[0]), list(span[1])
    starts[axis], stops[axis] = span[0][axis] + first, span[0][axis] + last
    return tuple(starts), tuple(stops)


def cells(target: Span, spans: Sequence[Span]) -> list[tuple[Span, tuple[int, ...]]]:
    """Cuts `target` so that each cell lies wholly inside or wholly outside each of `spans`.

    Returns:
        Cells in row-major order, each with the indexes of the spans that hold it (none: nobody does).
    """
    if not target[0]:
        return [(target, tuple(range(len(spans))))]
    bounds = np.asarray(spans, dtype=np.int64).reshape(len(spans), 2, -1)
    starts, stops = np.maximum(bounds[:, 0], target[0]), np.minimum(bounds[:, 1], target[1])
    meeting = np.flatnonzero((starts < stops).all(axis=1))
    cuts = [
        np.unique(np.concatenate([[low, high], starts[meeting, axis], stops[meeting, axis]]))
        for axis, (low, high) in enumerate(zip(*target, strict=True))
    ]
    first = [np.searchsorted(cut, starts[meeting, axis]).tolist() for axis, cut in enumerate(cuts)]
    last = [np.searchsorted(cut, stops[meeting, axis]).tolist() for axis, cut in enumerate(cuts)]
    holders: dict[tuple[int, ...], tuple[int, ...]] = {}
    for position, index in enumerate(meeting.tolist()):
        ranges = [range(low[position], high[position]) for low, high in zip(first, last, strict=True)]
        for cell in itertools.product(*ranges):
            holders[cell] = (*holders.get(cell, ()), index)
    edges = [cut.tolist() for cut in cuts]
    return [
        (
            (
                tuple(edge[i] for edge, i in zip(edges, cell, strict=True)),
                tuple(edge[i + 1] for edge, i in zip(edges, cell, strict=True)),
            ),
            holders.get(cell, ()),
        )
        for cell in itertools.product(*(range(len(edge) - 1) for edge in edges))
    ]
