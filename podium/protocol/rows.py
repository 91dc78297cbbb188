"""Row operations (dim 0) on one column: dense tensors and jagged nested tensors alike.

Jagged columns that share an ``offsets`` tensor may be combined elementwise, and torch knows that only from the tensor's
identity. The operations therefore take a ``memo`` that maps old offsets to new ones, so columns that shared offsets
before an operation share them after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

Memo = dict[Any, Any]


def columns(batch: TensorDict | None) -> dict[str, Tensor]:
    """The tensors of ``batch`` by name, as a dict of its own; empty for None."""
    return {} if batch is None else cast(dict[str, Tensor], dict(batch.items()))


def _jagged_parts(t: Any) -> tuple[Tensor, Tensor]:
    """Values packed along dim 0 and offsets (rows + 1,)."""
    if t.lengths() is None and t._ragged_idx == 1:
        return t.values(), t.offsets()
    packed: Any = torch.nested.as_nested_tensor(list(t.unbind()), layout=torch.jagged)
    return packed.values(), packed.offsets()


def from_parts(values: Tensor, offsets: Tensor) -> Tensor:
    """A jagged tensor over ``values`` (sum of lengths, ...) with ``offsets`` (rows + 1,)."""
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def slice_rows(t: Tensor, start: int, stop: int, memo: Memo) -> Tensor:
    """Rows ``start:stop`` as a view."""
    if not t.is_nested:
        return t[start:stop]
    values, offsets = _jagged_parts(t)
    key = (id(offsets), start, stop)
    if key not in memo:
        first, last = int(offsets[start]), int(offsets[stop])
        # The old offsets are kept in the memo too: an id means nothing once its tensor is gone.
        memo[key] = (offsets[start : stop + 1] - first, first, last, offsets)
    new_offsets, first, last, _ = memo[key]
    return from_parts(values[first:last], new_offsets)


def split_rows(t: Tensor, sizes: list[int], memo: Memo) -> Sequence[Tensor]:
    """Runs of rows as views, one after the other; ``sizes`` add up to the rows."""
    # Of the views that a split of one call gives, autograd lets none be written to.
    if isinstance(t, Tensor) and not t.is_nested and not t.requires_grad and sizes:
        return t.split_with_sizes(sizes)
    ends = list(accumulate(sizes))
    return [slice_rows(t, end - size, end, memo) for end, size in zip(ends, sizes, strict=True)]


def take_rows(t: Tensor, index: Tensor, memo: Memo) -> Tensor:
    """Rows ``index`` (an int64 tensor of non-negative row numbers), copied."""
    if not t.is_nested:
        return t.index_select(0, index.to(t.device))  # half the time of t[index]
    values, offsets = _jagged_parts(t)
    key = id(offsets)
    if key not in memo:
        index = index.to(offsets.device)
        lengths = offsets.diff()[index]
        new_offsets = torch.cat([offsets.new_zeros(1), lengths.cumsum(0)])
        shift = torch.repeat_interleave(offsets[:-1][index] - new_offsets[:-1], lengths)
        memo[key] = (new_offsets, shift + torch.arange(shift.numel(), device=shift.device), offsets)
    new_offsets, positions, _ = memo[key]
    return from_parts(values[positions], new_offsets)


def cat_rows(tensors: Sequence[Tensor], memo: Memo) -> Tensor:
    """Rows of every tensor, one after the other."""
    if not any(t.is_nested for t in tensors):
        return torch.cat(list(tensors), dim=0)
    if not all(t.is_nested for t in tensors):
        raise ValueError("cannot concatenate a jagged column with a dense one of the same name")
    parts = [_jagged_parts(t) for t in tensors]
    key = tuple(id(offsets) for _, offsets in parts)
    if key not in memo:
        lengths = torch.cat([offsets.diff() for _, offsets in parts])
        memo[key] = (torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), parts)
    return from_parts(torch.cat([values for values, _ in parts]), memo[key][0])


def repeat_rows(t: Tensor, times: int, interleave: bool, memo: Memo) -> Tensor:
    """Every row ``times`` times: neighbours if ``interleave``, else the whole column again and again."""
    rows = torch.arange(t.size(0))
    return take_rows(t, rows.repeat_interleave(times) if interleave else rows.repeat(times), memo)


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and values; NaN equals NaN in the same place."""
    if a is b:
        return True
    if a.is_nested or b.is_nested:
        if not (a.is_nested and b.is_nested):
            return False
        return all(equal_tensors(x, y) for x, y in zip(_jagged_parts(a), _jagged_parts(b), strict=True))
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def row_numbers(idxs: Any, rows: int) -> Tensor:
    """Rows given by number (negative ones from the end) or by a mask, as non-negative int64 on the CPU."""
    index = torch.as_tensor(idxs)
    if index.dim() != 1:
        raise IndexError(f"rows must be given in one dimension, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if index.numel() != rows:
            raise IndexError(f"a mask of {index.numel()} for a batch of {rows} rows")
        return index.nonzero().squeeze(1).cpu()
    index = index.to("cpu", torch.int64)
    if index.numel() and not (-rows <= int(index.min()) and int(index.max()) < rows):
        raise IndexError(f"row {int(index.max())} (or {int(index.min())}) of a batch of {rows} rows")
    return torch.where(index < 0, index + rows, index)
