"""Python values inside a DataProto: copying, comparing, and packing tensors for pickle protocol 5."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.protocol.rows import _jagged_parts, equal_tensors, from_parts

# A tensor over a received, read-only buffer is what zero-copy means here (see DataProto's docstring). Torch warns of it
# once in a process: let that be here, unheard.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))

_ATOMS = frozenset([str, int, float, bool, type(None), bytes, complex, type])


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A 1-d object array with one element a row, also where the elements are lists of one length."""
    return np.fromiter(values, dtype=object)


def get_column(columns: Mapping[str, Any], key: str, where: str) -> Any:
    """``columns[key]``, or a KeyError that names what there is."""
    if key not in columns:
        raise KeyError(f"no {key!r} in {where}; there are {sorted(columns)}")
    return columns[key]


def copy_value(value: Any) -> Any:
    """A copy that shares nothing mutable with ``value``; objects that refuse to be copied are shared."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {k: v if type(v) in _ATOMS else copy_value(v) for k, v in value.items()}
    if kind is list:
        return [v if type(v) in _ATOMS else copy_value(v) for v in value]
    if isinstance(value, Tensor):
        return value.detach().clone() if not value.requires_grad else value.clone()
    if kind is np.ndarray and value.dtype != object:
        return value.copy()
    if kind is np.ndarray:
        out = np.empty_like(value)
        for i in np.ndindex(value.shape):
            out[i] = copy_value(value[i])
        return out
    try:
        return copy.deepcopy(value)
    except (TypeError, NotImplementedError, RuntimeError, AttributeError):
        return value  # a lock, a handle, a module: what cannot be copied is shared


def repeat_objects(column: np.ndarray, where: np.ndarray) -> np.ndarray:
    """``column[where]``, each cell a copy of its own."""
    if column.dtype != object or column.ndim != 1 or all(type(v) in _ATOMS for v in column):
        return column[where]
    copiers = [v.copy if _is_flat(v) else functools.partial(copy_value, v) for v in column]
    return object_array(copiers[row]() for row in where.tolist())


def _is_flat(value: Any) -> bool:
    """Whether a shallow copy shares nothing mutable: the common case, found out once for all copies."""
    return type(value) is dict and all(type(v) in _ATOMS for v in value.values())


def equal_values(a: Any, b: Any) -> bool:
    """Deep equality in which NaN equals NaN and arrays and tensors are compared by value."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and equal_tensors(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return _equal_arrays(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_values(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal_values, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    return bool(a == b)


def _equal_arrays(a: Any, b: Any) -> bool:
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.shape != b.shape:
        return False
    if a.dtype == object or b.dtype == object:
        return all(map(equal_values, a.ravel(), b.ravel()))
    if a.dtype.kind in "fc" and b.dtype.kind in "fc":
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.array_equal(a, b))


def own_duplicates(objects: dict[str, np.ndarray], where: np.ndarray) -> None:
    """A row picked twice must not be one object twice."""
    seen: set[int] = set()
    again = [i for i, row in enumerate(where.tolist()) if row in seen or seen.add(row)]  # type: ignore[func-returns-value]
    for column in objects.values():
        if column.dtype == object:
            for i in again:
                column[i] = copy_value(column[i])


class _Packed:
    """Stands for a tensor while pickling, so that its own bytes, and no others, travel out of band."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        t = self.tensor.detach().cpu()
        shape, dtype = tuple(t.shape), t.dtype
        t = t.resolve_conj().resolve_neg().contiguous()
        # numpy knows no bfloat16 or float8, and raw bytes suit every dtype.
        return _rebuild_dense, (t.reshape(-1).view(torch.uint8).numpy(), dtype, shape)


class _PackedJagged:
    """The same for a jagged tensor, in parts."""

    __slots__ = ("offsets", "values")

    def __init__(self, values: _Packed, offsets: _Packed) -> None:
        self.values, self.offsets = values, offsets

    def __reduce__(self) -> tuple[Any, ...]:
        return from_parts, (self.values, self.offsets)


def _rebuild_dense(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def pack(value: Any, shared: dict[int, _Packed]) -> Any:
    """``value`` with every tensor in its dicts, lists, tuples and object arrays packed; itself where there is none.

    Unpickling gives tensors again: there is no ``unpack``. ``shared`` is one dict for all that is pickled together, so
    that jagged columns with the same offsets have the same offsets on the other side.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, Tensor):
        if not value.is_nested:
            return _Packed(value)
        values, offsets = _jagged_parts(value.detach())
        return _PackedJagged(_Packed(values), shared.setdefault(id(offsets), _Packed(offsets)))
    if kind is dict:
        new = {k: pack(v, shared) for k, v in value.items()}
        return new if any(new[k] is not v for k, v in value.items()) else value
    if kind is list or kind is tuple:
        items = [pack(v, shared) for v in value]
        return kind(items) if any(x is not y for x, y in zip(items, value, strict=True)) else value
    if kind is np.ndarray and value.dtype == object:
        cells = [pack(v, shared) for v in value.ravel()]
        if all(x is y for x, y in zip(cells, value.ravel(), strict=True)):
            return value
        return object_array(cells).reshape(value.shape)
    return value
