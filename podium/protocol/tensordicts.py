"""DataProto to one TensorDict and back, objects and ``meta_info`` included."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from podium.protocol.rows import columns
from podium.protocol.values import object_array


def join_tensordict(
    batch: TensorDict | None, objects: dict[str, np.ndarray], meta: dict[str, Any], rows: int
) -> TensorDict:
    """One TensorDict of ``rows`` rows. A name used twice is a ValueError."""
    names = [*(batch.keys() if batch is not None else ()), *objects, *meta]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"name(s) {twice} are used twice among batch, non_tensor_batch and meta_info")
    size = batch.batch_size if batch is not None else [rows]
    out: Any = TensorDict({**columns(batch)}, batch_size=size)
    for key, column in objects.items():
        cells = [NonTensorData(value) for value in column]
        # A stack of nothing cannot be built; an empty column is one value that says so.
        stacked = NonTensorStack(*cells) if cells else NonTensorData(column, batch_size=[0])
        out._set_str(key, stacked, validated=True, inplace=False, non_blocking=False)
    for key, value in meta.items():
        out._set_str(key, NonTensorData(value, batch_size=size), validated=True, inplace=False, non_blocking=False)
    return out


def split_tensordict(td: TensorDict | None) -> tuple[dict[str, Tensor], dict[str, np.ndarray], dict[str, Any]]:
    """Tensors, object columns and single values of ``td``."""
    tensors: dict[str, Tensor] = {}
    objects: dict[str, np.ndarray] = {}
    meta: dict[str, Any] = {}
    if td is None:
        return tensors, objects, meta
    for key in map(str, list(td.keys())):
        value: Any = td._get_str(key, None)
        if isinstance(value, NonTensorStack):
            objects[key] = object_array(cell.data for cell in value.tensordicts)
        elif isinstance(value, NonTensorData):
            data = value.data
            if isinstance(data, np.ndarray) and data.shape[:1] == (0,) and td.batch_size[:1] == (0,):
                objects[key] = data
            else:
                meta[key] = data
        else:
            tensors[key] = value
    return tensors, objects, meta
