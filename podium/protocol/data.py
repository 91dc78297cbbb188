"""``DataProto``: the batch that crosses between driver and workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from podium.protocol.rows import Memo, columns, equal_tensors, repeat_rows, row_numbers, slice_rows, take_rows
from podium.protocol.values import (
    copy_value,
    equal_values,
    get_column,
    object_array,
    own_duplicates,
    pack,
    repeat_objects,
)

Index = int | slice | Sequence[int] | np.ndarray | Tensor


@dataclass
class DataProtoItem:
    """One row of a DataProto: tensors without their batch dimension, one object a column."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """Tensor columns, object columns and facts about the whole batch. Method names and meanings are verl's.

    Attributes:
        batch: TensorDict whose columns have the batch on dim 0 (dense, or nested with layout jagged), or None.
        non_tensor_batch: numpy arrays with the batch on dim 0, usually of dtype object.
        meta_info: anything that belongs to no row.

    The constructor copies the dicts it is given (not the tensors) and never changes them. Slices and chunks are views
    of the same rows: a write to row i of a slice is a write to that row of the source. Where a row is repeated, its
    objects are copied, so one row never shows what was written to another. ``meta_info`` is copied by every method that
    makes a new DataProto.

    Pickled with protocol 5, tensors travel as out-of-band buffers of exactly their own bytes, on the CPU. A tensor read
    from Ray's object store lies in the store's memory: two readers of one reference see each other's in-place writes.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        batch: TensorDict | Mapping[str, Tensor] | None = None,
        non_tensor_batch: Mapping[str, np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(batch, TensorDict):
            self.batch: TensorDict | None = _like(batch, columns(batch), batch.batch_size)
        else:
            self.batch = _tensordict(batch, 1) if batch else None
        self.non_tensor_batch: dict[str, np.ndarray] = dict(non_tensor_batch or {})
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        self.check_consistency()

    @classmethod
    def _make(cls, batch: TensorDict | None, objects: dict[str, np.ndarray], meta: dict[str, Any]) -> DataProto:
        self = cls.__new__(cls)
        self.batch, self.non_tensor_batch, self.meta_info = batch, objects, meta
        return self

    # ---------------------------------------------------------------- building

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """From columns. ``non_tensors`` may be arrays or lists, one element a row.

        ``num_batch_dims`` leading dimensions are the tensors' batch size (object columns need 1). ``auto_padding`` is
        taken for verl's sake: an uneven batch is always padded when it is dispatched.

        Raises:
            ValueError: columns of different lengths (the column is named).
        """
        if num_batch_dims < 1:
            raise ValueError(f"num_batch_dims must be at least 1, got {num_batch_dims}")
        if non_tensors and num_batch_dims != 1:
            raise ValueError("object columns need num_batch_dims=1")
        objects = {k: v if isinstance(v, np.ndarray) else object_array(v) for k, v in (non_tensors or {}).items()}
        batch = _tensordict(tensors, num_batch_dims) if tensors else None
        self = cls._make(batch, objects, dict(meta_info or {}))
        self.check_consistency()
        return self

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """From one dict: tensors become tensor columns, numpy arrays object columns.

        Raises:
            ValueError: a value is neither.
        """
        tensors = {k: v for k, v in data.items() if isinstance(v, Tensor)}
        objects = {k: v for k, v in data.items() if isinstance(v, np.ndarray)}
        if len(tensors) + len(objects) != len(data):
            wrong = next(k for k in data if k not in tensors and k not in objects)
            raise ValueError(f"column {wrong!r} is a {type(data[wrong]).__name__}; expected a tensor or a numpy array")
        return cls.from_dict(tensors, objects, meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict | None = None, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """From a TensorDict: non-tensor stacks become object columns, single non-tensors ``meta_info``."""
        from podium.protocol.tensordicts import split_tensordict

        tensors, objects, meta = split_tensordict(tensor_dict)
        return cls.from_dict(tensors, objects, {**meta, **(meta_info or {})}, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """The same columns in one TensorDict, object columns as non-tensor stacks, ``meta_info`` as non-tensors.

        Raises:
            ValueError: a name is used twice.
        """
        from podium.protocol.tensordicts import join_tensordict

        return join_tensordict(self.batch, self.non_tensor_batch, self.meta_info, len(self))

    def check_consistency(self) -> None:
        """Every column has the batch on dim 0 and one length.

        Raises:
            ValueError: naming the column that does not fit.
        """
        rows, first = (None, "") if self.batch is None else (self.batch.batch_size[0], "the tensor batch")
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray) or value.ndim == 0:
                raise ValueError(f"object column {key!r} is a {type(value).__name__}; expected a numpy array of rows")
            if rows is None:
                rows, first = len(value), f"column {key!r}"
            elif len(value) != rows:
                raise ValueError(f"object column {key!r} has {len(value)} rows, {first} has {rows}")

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(v) for v in self.non_tensor_batch.values()), 0)

    def __getitem__(self, item: Index) -> Any:
        """An int gives a DataProtoItem; a slice (a view), list, array or tensor of rows (or a mask) a DataProto."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            return self._item(int(item))
        return self.select_idxs(item)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Same columns, dtypes, values and ``meta_info``; NaN equals NaN."""
        if not isinstance(other, DataProto):
            return NotImplemented
        if len(self) != len(other):
            return False
        mine, theirs = self._tensors(), other._tensors()
        return (
            mine.keys() == theirs.keys()
            and all(equal_tensors(v, theirs[k]) for k, v in mine.items())
            and equal_values(self.non_tensor_batch, other.non_tensor_batch)
            and equal_values(self.meta_info, other.meta_info)
        )

    def __repr__(self) -> str:
        tensors = {k: f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for k, v in self._tensors().items()}
        return f"DataProto({len(self)} rows, {tensors}, objects={list(self.non_tensor_batch)}, meta={self.meta_info})"

    def print_size(self, prefix: str = "") -> None:
        """Print the bytes of the tensors and of the object columns (their arrays only) in GiB."""
        tensors, objects = data_ops.column_bytes(self)
        lead = f"{prefix}, " if prefix else ""
        print(f"{lead}Size of tensordict: {tensors / 2**30} GB, size of non_tensor_batch: {objects / 2**30} GB")

    def get_data_info(self) -> str:
        """Names, shapes, dtypes and devices of every column, and types of ``meta_info``, one a line."""
        return data_ops.describe(self)

    # ---------------------------------------------------------------- choosing rows

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows ``start:end:step``; views where step is 1."""
        first, last, stride = slice(start, end, step).indices(len(self))
        if stride != 1:
            return self.select_idxs(list(range(first, last, stride)))
        return self._slice(first, max(first, last), {})

    def select_idxs(self, idxs: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Rows by number (negative ones count from the end) or by a mask, in the order given.

        Raises:
            IndexError: a row that is not there, or a mask of another length.
        """
        index = row_numbers(idxs, len(self))
        where = index.numpy()
        objects = {k: v[where] for k, v in self.non_tensor_batch.items()}
        own_duplicates(objects, where)
        memo: Memo = {}
        batch = self._map(lambda t: take_rows(t, index, memo), len(where))
        return self._make(batch, objects, copy_value(self.meta_info))

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` runs of rows whose sizes differ by at most one (the longer ones first); views.

        Raises:
            ValueError: more chunks than rows.
        """
        rows = len(self)
        if chunks < 1 or (chunks > rows and chunks != 1):
            raise ValueError(f"cannot cut {rows} rows into {chunks} chunks: need 1 <= chunks <= rows")
        size, longer = divmod(rows, chunks)
        return data_ops.runs(self, [size + 1] * longer + [size] * (chunks - longer))

    def split(self, split_size: int) -> list[DataProto]:
        """Runs of ``split_size`` rows, the last one perhaps shorter; views.

        Raises:
            ValueError: ``split_size`` is not positive.
        """
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, got {split_size}")
        whole, rest = divmod(len(self), split_size)
        return data_ops.runs(self, [split_size] * whole + [rest] * (rest > 0))

    def reorder(self, indices: Sequence[int] | np.ndarray | Tensor) -> None:
        """Put the rows in this order, in place."""
        new = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = new.batch, new.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: aabb if ``interleave``, else abab. Objects are copied."""
        memo: Memo = {}
        batch = self._map(lambda t: repeat_rows(t, repeat_times, interleave, memo), len(self) * repeat_times)
        rows = np.arange(len(self))
        where = rows.repeat(repeat_times) if interleave else np.tile(rows, repeat_times)
        objects = {k: repeat_objects(v, where) for k, v in self.non_tensor_batch.items()}
        return self._make(batch, objects, copy_value(self.meta_info))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Row i ``repeat_times[i]`` times, neighbours together.

        Raises:
            ValueError: not one count a row.
        """
        times = np.asarray(repeat_times, dtype=np.int64)
        if times.shape != (len(self),):
            raise ValueError(f"repeat_times has shape {times.shape}; expected one count for each of {len(self)} rows")
        return self.select_idxs(np.arange(len(self)).repeat(times))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches, ``epochs`` times over, shuffled by ``seed`` if ``dataloader_kwargs={"shuffle": True}``.

        Raises:
            ValueError: ``mini_batch_size`` does not divide the rows, or an unknown keyword.
        """
        return data_ops.mini_batches(self, mini_batch_size, epochs, seed, dict(dataloader_kwargs or {}))

    # ---------------------------------------------------------------- choosing columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Only these columns (None: all). Tensors are shared unless ``deepcopy``.

        Raises:
            KeyError: a column that is not there.
        """
        tensors, objects, meta = self._tensors(), self.non_tensor_batch, self.meta_info
        if batch_keys is not None:
            tensors = {k: get_column(tensors, k, "batch") for k in batch_keys}
        if non_tensor_batch_keys is not None:
            objects = {k: get_column(objects, k, "non_tensor_batch") for k in non_tensor_batch_keys}
        if meta_info_keys is not None:
            meta = {k: get_column(meta, k, "meta_info") for k in meta_info_keys}
        if deepcopy:
            tensors, objects = {k: v.clone() for k, v in tensors.items()}, copy_value(objects)
        batch = None if self.batch is None else _like(self.batch, tensors, self.batch.batch_size)
        return self._make(batch, dict(objects), copy_value(meta))

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take these columns out of this batch (None: none of them) and return them as a batch.

        Raises:
            KeyError: a column that is not there; nothing has been taken then.
        """
        wanted = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        wanted.meta_info = {k: self.meta_info.pop(k) for k in meta_info_keys or []}
        for key in batch_keys or []:
            del self.batch[key]  # type: ignore[union-attr]
        for key in non_tensor_batch_keys or []:
            del self.non_tensor_batch[key]
        if wanted.batch is not None and not batch_keys and wanted.non_tensor_batch:
            wanted.batch = None
        return wanted

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> DataProto:
        """Rename tensor columns in place; returns self.

        Raises:
            ValueError: not one new name for each old one.
            KeyError: a column that is not there.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old names and {len(new)} new ones: {old} -> {new}")
        tensors = self._tensors()
        for key in old:
            get_column(tensors, key, "batch")
        names = dict(zip(old, new, strict=True))
        if self.batch is not None:
            self.batch = _like(self.batch, {names.get(k, k): v for k, v in tensors.items()}, self.batch.batch_size)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the other's columns and ``meta_info`` to this batch, in place; returns self.

        Raises:
            ValueError: different lengths, or a name both have with different values (NaNs in one place are equal).
        """
        data_ops.union_into(self, other)
        return self

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Rows of every batch, one after the other; ``meta_info["metrics"]`` of all become lists, one value a batch.

        Raises:
            ValueError: nothing to concatenate, columns differ, or ``meta_info`` disagrees (the key is named).
        """
        return data_ops.concat(data)

    # ---------------------------------------------------------------- shape, device, disk

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Turn dim 1 of ``split_keys`` (n_split groups a row) into rows; every other column is repeated to match.

        Raises:
            ValueError: ``n_split`` does not divide dim 1 of a split column.
        """
        return data_ops.unfold_column_chunks(self, n_split, set(split_keys or ()))

    def to(self, device: torch.device | str) -> DataProto:
        """Move the tensors, in place; returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def save_to_disk(self, filepath: str) -> None:
        """Write one safetensors file. Objects must be plain data (str, numbers, containers, arrays, tensors).

        Raises:
            UserError: a value that is not plain data (its place is named).
        """
        from podium.protocol.disk import save

        save(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str) -> DataProto:
        """Read what ``save_to_disk`` wrote. Never runs code from the file.

        Raises:
            UserError: not such a file.
        """
        from podium.protocol.disk import load

        return load(filepath)

    # ---------------------------------------------------------------- copying and pickling

    def __copy__(self) -> DataProto:
        batch = None if self.batch is None else _like(self.batch, self._tensors(), self.batch.batch_size)
        return self._make(batch, dict(self.non_tensor_batch), copy_value(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        return self.select(deepcopy=True)

    def __reduce__(self) -> tuple[Any, ...]:
        shared: dict[int, Any] = {}
        tensors = None if self.batch is None else {k: pack(v, shared) for k, v in self._tensors().items()}
        size = None if self.batch is None else tuple(self.batch.batch_size)
        return _unpickle, (tensors, size, pack(self.non_tensor_batch, shared), pack(self.meta_info, shared))

    # ---------------------------------------------------------------- inside

    def _tensors(self) -> dict[str, Tensor]:
        return columns(self.batch)

    def _map(self, fn: Any, rows: int) -> TensorDict | None:
        if self.batch is None:
            return None
        size = torch.Size([rows, *self.batch.batch_size[1:]])
        return _like(self.batch, {k: fn(v) for k, v in columns(self.batch).items()}, size)

    def _slice(self, start: int, stop: int, memo: Memo) -> DataProto:
        batch = self._map(lambda t: slice_rows(t, start, stop, memo), stop - start)
        objects = {k: v[start:stop] for k, v in self.non_tensor_batch.items()}
        return self._make(batch, objects, copy_value(self.meta_info))

    def _item(self, row: int) -> DataProtoItem:
        rows = len(self)
        if not -rows <= row < rows:
            raise IndexError(f"row {row} of a batch of {rows} rows")
        batch = None
        if self.batch is not None:
            batch = _like(self.batch, {k: v[row] for k, v in columns(self.batch).items()}, self.batch.batch_size[1:])
        return DataProtoItem(batch, {k: v[row] for k, v in self.non_tensor_batch.items()}, copy_value(self.meta_info))


def _like(source: TensorDict, tensors: dict[str, Tensor], size: torch.Size) -> TensorDict:
    # Rows of columns that were checked when ``source`` was made need not be checked again.
    return TensorDict._new_unsafe(tensors, batch_size=size, device=source.device, nested=False)


def _tensordict(tensors: Mapping[str, Tensor], num_batch_dims: int) -> TensorDict:
    size, first = None, ""
    for key, value in tensors.items():
        if not isinstance(value, Tensor) or not isinstance(key, str):
            raise ValueError(f"column {key!r} is a {type(value).__name__}; expected a tensor under a string")
        if value.dim() < num_batch_dims:
            raise ValueError(
                f"column {key!r} has shape {tuple(value.shape)}; expected {num_batch_dims} batch dimension(s)"
            )
        mine = value.shape[:num_batch_dims]
        if size is None:
            size, first = mine, key
        elif mine != size:
            raise ValueError(f"column {key!r} has batch size {list(mine)}, column {first!r} has {list(size)}")
    return TensorDict._new_unsafe(dict(tensors), batch_size=size, nested=False)


def _unpickle(
    tensors: dict[str, Tensor] | None,
    size: tuple[int, ...] | None,
    objects: dict[str, np.ndarray],
    meta: dict[str, Any],
) -> DataProto:
    batch = None if tensors is None else TensorDict(tensors, batch_size=torch.Size(size or ()))
    return DataProto._make(batch, objects, meta)


__all__ = ["DataProto", "DataProtoItem"]


from podium.protocol import data_ops  # noqa: E402 - it works on the class above
