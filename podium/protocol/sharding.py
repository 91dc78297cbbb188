"""Cutting a batch for ranks, padding included, and dropping the padding from what comes back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from podium.protocol.data import DataProto
from podium.protocol.rows import columns
from podium.utils.errors import UserError

DISPATCH_VALID = "dispatch_valid"
"""Bool column (B,) that every shard of an unevenly divided batch carries: False in the rows added as padding."""


def shard(data: DataProto, n: int) -> list[DataProto]:
    """``n`` shards of equal length, in row order.

    Where ``n`` divides the length these are views of the rows. Otherwise the real rows are spread so that shards differ
    by at most one, shorter ones repeat a row at their end, and every shard carries ``dispatch_valid``. A batch without
    columns (only ``meta_info``) goes to every shard.

    Raises:
        UserError: columns but no rows.
    """
    rows = len(data)
    if rows == 0:
        if data.non_tensor_batch or columns(data.batch):
            raise UserError(f"cannot dispatch a batch of 0 rows to {n} ranks; skip the call or send at least one row")
        return [data.select() for _ in range(n)]
    if rows % n == 0:
        return data.chunk(n)
    small, longer = divmod(rows, n)
    shards, start = [], 0
    for i in range(n):
        real = small + (i < longer)
        index = np.full(small + 1, start if real else 0)
        index[:real] = np.arange(start, start + real)
        piece = data.slice(start, start + real) if real == small + 1 else data.select_idxs(index)
        valid = torch.arange(small + 1) < real
        if piece.batch is None:
            piece.batch = TensorDict({DISPATCH_VALID: valid}, batch_size=[small + 1])
        else:
            piece.batch[DISPATCH_VALID] = valid.to(piece.batch.device) if piece.batch.device else valid
        shards.append(piece)
        start += real
    return shards


def real_rows(values: Iterable[Any]) -> tuple[int, int] | None:
    """(real rows, all rows) of the first padded shard among a call's arguments, or None."""
    for value in values:
        if isinstance(value, DataProto | TensorDict):
            batch = value.batch if isinstance(value, DataProto) else value
            valid = columns(batch).get(DISPATCH_VALID)
            if valid is not None:
                return int(valid.sum()), len(valid)
    return None


def drop_padding(result: Any, rows: tuple[int, int]) -> Any:
    """``result`` without the rows made from padding and without the ``dispatch_valid`` column.

    Rows are recognised by the column if it is there, else by position: k result rows for each row sent, neighbours
    together. A result of as many rows as were real is taken to be free of padding already.

    Raises:
        ValueError: a length that fits neither.
    """
    if isinstance(result, TensorDict):
        return drop_padding(DataProto.from_tensordict(result), rows).to_tensordict()
    if not isinstance(result, DataProto):
        return result
    real, sent = rows
    tensors = columns(result.batch)
    if DISPATCH_VALID in tensors:
        keep = tensors.pop(DISPATCH_VALID)
        result = result if bool(keep.all()) else result.select_idxs(keep)
        result = result.select(batch_keys=list(tensors))
        if not tensors and result.non_tensor_batch:
            result.batch = None
        return result
    got = len(result)
    if got in (0, real):
        return result
    if got % sent:
        raise ValueError(
            f"the batch had {real} real rows padded to {sent}, the result has {got} rows: cannot tell which are "
            f"padding; carry the column {DISPATCH_VALID!r} along"
        )
    return result.slice(0, real * (got // sent))
