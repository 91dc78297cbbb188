"""Operations on whole DataProtos and on dicts of columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from podium.protocol.data import DataProto, DataProtoItem, _like
from podium.protocol.rows import Memo, cat_rows, columns, equal_tensors, split_rows
from podium.protocol.values import copy_value, equal_values, object_array

T = TypeVar("T", DataProto, TensorDict)


def runs(data: DataProto, sizes: list[int]) -> list[DataProto]:
    """Views of runs of rows, one after the other; ``sizes`` add up to the rows."""
    memo: Memo = {}
    tensors, objects, meta = data._tensors(), data.non_tensor_batch, data.meta_info
    pieces = [split_rows(v, sizes, memo) for v in tensors.values()]
    rest = () if data.batch is None else data.batch.batch_size[1:]
    shapes = {size: torch.Size((size, *rest)) for size in set(sizes)}
    out, start = [], 0
    for size, *parts in zip(sizes, *pieces, strict=True):
        stop = start + size
        batch = None if data.batch is None else _like(data.batch, dict(zip(tensors, parts, strict=True)), shapes[size])
        out.append(DataProto._make(batch, {k: v[start:stop] for k, v in objects.items()}, copy_value(meta)))
        start = stop
    return out


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """Put the second's columns into the first (in place) and return it; None is a TensorDict of no columns.

    Raises:
        ValueError: different batch sizes, or one name with different values.
    """
    if tensor_dict2 is None:
        return tensor_dict1
    if tensor_dict1 is None:
        return _like(tensor_dict2, columns(tensor_dict2), tensor_dict2.batch_size)
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ValueError(f"batch sizes {list(tensor_dict1.batch_size)} and {list(tensor_dict2.batch_size)} differ")
    held, new = tensor_dict1.keys(), {}
    for key, value in tensor_dict2.items():
        if key not in held:
            new[key] = value
        elif not equal_tensors(tensor_dict1.get(key), value):
            raise ValueError(f"tensor column {key!r} is in both with different values")
    for key, value in new.items():
        # Both batch sizes were checked when the two were made, and agree.
        tensor_dict1._set_str(key, value, validated=True, inplace=False, non_blocking=False)
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: MutableMapping[str, np.ndarray], tensor_dict2: Mapping[str, np.ndarray]
) -> MutableMapping[str, np.ndarray]:
    """Put the second's object columns into the first (in place) and return it.

    Raises:
        ValueError: one name with different values.
    """
    _check_common(tensor_dict1, tensor_dict2, "object column")
    return _add_missing(tensor_dict1, tensor_dict2)


def _check_common(a: Mapping[str, Any], b: Mapping[str, Any], what: str) -> None:
    for key, value in b.items():
        if key in a and not equal_values(a[key], value):
            raise ValueError(f"{what} {key!r} is in both with different values")


def _add_missing(into: MutableMapping[str, Any], other: Mapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in other.items():
        into.setdefault(key, value)
    return into


def union_into(data: DataProto, other: DataProto) -> None:
    """``DataProto.union``: every check is made before the first change."""
    mine, theirs = _has_rows(data), _has_rows(other)
    if mine and theirs and len(data) != len(other):
        raise ValueError(f"cannot unite a batch of {len(data)} rows with one of {len(other)} rows")
    _check_common(data.meta_info, other.meta_info, "meta_info")
    _check_common(data.non_tensor_batch, other.non_tensor_batch, "object column")
    data.batch = union_tensor_dict(data.batch, other.batch)
    _add_missing(data.non_tensor_batch, other.non_tensor_batch)
    if other.meta_info:
        _add_missing(data.meta_info, copy_value(other.meta_info))


def _has_rows(data: DataProto) -> bool:
    return data.batch is not None or bool(data.non_tensor_batch)


def concat(data: Sequence[DataProto]) -> DataProto:
    """``DataProto.concat``."""
    if len(data) == 0:
        raise ValueError("DataProto.concat needs at least one DataProto, got an empty sequence")
    meta = _merge_meta([d.meta_info for d in data])
    if len(data) == 1:
        only = data[0].select()
        only.meta_info = meta
        return only
    batch, first = None, data[0].batch
    memo: Memo = {}
    tensors = [d._tensors() for d in data]
    _same_keys(tensors, "tensor")
    if any((d.batch is None) != (first is None) for d in data):
        raise ValueError("cannot concatenate batches with tensors and batches without")
    if first is not None:
        rows = sum(len(d) for d in data)
        size = torch.Size([rows, *first.batch_size[1:]])
        batch = _like(first, {k: cat_rows([t[k] for t in tensors], memo) for k in tensors[0]}, size)
    _same_keys([d.non_tensor_batch for d in data], "object")
    objects = {k: np.concatenate([d.non_tensor_batch[k] for d in data]) for k in data[0].non_tensor_batch}
    return DataProto._make(batch, objects, meta)


def _same_keys(columns: Sequence[Mapping[str, Any]], what: str) -> None:
    for i, d in enumerate(columns):
        if d.keys() != columns[0].keys():
            odd = sorted(d.keys() ^ columns[0].keys())
            raise ValueError(f"cannot concatenate: {what} column(s) {odd} are not in both batch 0 and batch {i}")


def _merge_meta(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for i, info in enumerate(infos):
        for key, value in info.items():
            if key == "metrics":
                metrics.extend([] if value is None else value if isinstance(value, list) else [value])
            elif key not in merged:
                merged[key] = copy_value(value)
            elif not equal_values(merged[key], value):
                raise ValueError(
                    f"cannot concatenate: meta_info {key!r} of batch {i} is {value!r}, before {merged[key]!r}"
                )
    if metrics:
        merged["metrics"] = list_of_dict_to_dict_of_list(metrics, strict=False)
    elif any("metrics" in info for info in infos):
        merged["metrics"] = {}
    return merged


def list_of_dict_to_dict_of_list(
    list_of_dict: Sequence[Mapping[str, Any]], strict: bool = True
) -> dict[str, list[Any]]:
    """``[{"a": 1}, {"a": 2}]`` to ``{"a": [1, 2]}``; with ``strict=False`` a dict may lack a key.

    Raises:
        ValueError: the dicts' keys differ.
    """
    out: dict[str, list[Any]] = {}
    for d in list_of_dict:
        if strict and d.keys() != list_of_dict[0].keys():
            raise ValueError(f"keys differ: {sorted(d)} and {sorted(list_of_dict[0])}")
        for key, value in d.items():
            out.setdefault(key, []).append(value)
    return out


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows (again and again) until ``size_divisor`` divides the length.

    Returns:
        The padded batch and the number of rows appended.

    Raises:
        ValueError: no rows to repeat.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, got {size_divisor}")
    rows, extra = len(data), -len(data) % size_divisor
    if rows == 0:
        raise ValueError(f"cannot pad a batch of no rows to a multiple of {size_divisor}")
    if extra == 0:
        return data, 0
    return data.select_idxs(np.concatenate([np.arange(rows), np.arange(extra) % rows])), extra


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Without the last ``pad_size`` rows."""
    return data[: len(data) - pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(rows, ...) to (new_batch_size, rows / new_batch_size, ...): groups of neighbours become rows.

    Raises:
        ValueError: ``new_batch_size`` does not divide the rows.
    """
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise ValueError(f"cannot fold {rows} rows into {new_batch_size} equal groups")
    lead = (new_batch_size, rows // new_batch_size)
    batch = None
    if data.batch is not None:
        folded = {k: v.reshape(*lead, *v.shape[1:]) for k, v in columns(data.batch).items()}
        batch = _like(data.batch, folded, torch.Size([new_batch_size]))
    objects = {k: v.reshape(*lead, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    return DataProto._make(batch, objects, copy_value(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The first ``batch_dims`` dimensions become the rows; undoes ``fold_batch_dim``."""
    batch = None
    if data.batch is not None:
        flat = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in columns(data.batch).items()}
        rows = next((len(v) for v in flat.values()), 0)
        batch = _like(data.batch, flat, torch.Size([rows]))
    objects = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in data.non_tensor_batch.items()}
    return DataProto._make(batch, objects, copy_value(data.meta_info))


def unfold_column_chunks(data: DataProto, n_split: int, split_keys: set[str]) -> DataProto:
    """``DataProto.unfold_column_chunks``."""
    repeated = data.repeat(n_split, interleave=True)

    def unfold(key: str, value: Any) -> Any:
        if value.ndim < 2 or value.shape[1] % n_split:
            raise ValueError(f"column {key!r} of shape {tuple(value.shape)}: dim 1 is not a multiple of {n_split}")
        return value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])

    for key, value in data._tensors().items():
        if key in split_keys:
            repeated.batch[key] = unfold(key, value)  # type: ignore[index]
    for key, column in data.non_tensor_batch.items():
        if key in split_keys:
            repeated.non_tensor_batch[key] = unfold(key, column)
    return repeated


def mini_batches(
    data: DataProto, size: int, epochs: int, seed: int | None, options: dict[str, Any]
) -> Iterator[DataProto]:
    """``DataProto.make_iterator``; arguments are checked before the first batch is asked for."""
    shuffle, drop_last = options.pop("shuffle", False), options.pop("drop_last", False)
    options.pop("num_workers", None)  # there is nothing to load: rows are in memory
    if options:
        raise ValueError(f"unknown dataloader_kwargs {sorted(options)}; there are shuffle and drop_last")
    if size < 1 or (len(data) % size and not drop_last):
        raise ValueError(f"mini_batch_size {size} does not divide the batch of {len(data)} rows")
    generator = None
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    stop = len(data) - len(data) % size

    def run() -> Iterator[DataProto]:
        for _ in range(epochs):
            if shuffle:
                order = torch.randperm(len(data), generator=generator)
                for start in range(0, stop, size):
                    yield data.select_idxs(order[start : start + size])
            else:
                for start in range(0, stop, size):
                    yield data.slice(start, start + size)

    return run()


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Rows to a batch: tensors stacked, objects gathered.

    Raises:
        ValueError: no rows.
    """
    if len(x) == 0:
        raise ValueError("collate_fn needs at least one row")
    tensors = None
    if x[0].batch is not None:
        tensors = {k: torch.stack([item.batch[k] for item in x]) for k in columns(x[0].batch)}  # type: ignore[index]
    objects = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    return DataProto.from_dict(tensors, {k: object_array(v) for k, v in objects.items()})


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace ``data`` by the rows of every rank of ``process_group``, in rank order; lengths may differ."""
    gathered: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    device = None if data.batch is None else data.batch.device
    torch.distributed.all_gather_object(gathered, data, group=process_group)
    meta = data.meta_info
    whole = concat([DataProto._make(d.batch, d.non_tensor_batch, {}) for d in gathered])
    data.batch, data.non_tensor_batch, data.meta_info = whole.batch, whole.non_tensor_batch, meta
    if device is not None:
        data.to(device)


def column_bytes(data: DataProto) -> tuple[int, int]:
    """Bytes of the tensors, and of the object columns' arrays (not of what they point to)."""
    tensors = 0
    for t in data._tensors().values():
        tensors += t.values().nbytes if t.is_nested else t.nbytes
    return tensors, sum(v.nbytes for v in data.non_tensor_batch.values())


def describe(data: DataProto) -> str:
    """``DataProto.get_data_info``."""
    lines = ["batch"] if data.batch is not None else []
    lines += [f"  {k}: {_shape(v)} ({v.dtype}) on {v.device}" for k, v in data._tensors().items()]
    lines += ["non_tensor_batch"] if data.non_tensor_batch else []
    lines += [f"  {k}: {v.shape} ({v.dtype})" for k, v in data.non_tensor_batch.items()]
    lines += ["meta_info"] if data.meta_info else []
    lines += [f"  {k}: {type(v).__name__}" for k, v in data.meta_info.items()]
    return "\n".join(lines)


def _shape(t: Tensor) -> str:
    return f"({t.size(0)} jagged rows)" if t.is_nested else str(tuple(t.shape))


__all__ = [
    "all_gather_data_proto",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
