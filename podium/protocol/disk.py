"""A DataProto as one safetensors file: tensors as they are, everything else as tagged JSON. No pickle."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.protocol.data import DataProto
from podium.protocol.rows import _jagged_parts, from_parts
from podium.utils.errors import UserError

_HEADER = "__podium_dataproto__"
_TAG = "__podium__"


class _Writer:
    """Turns values into JSON; tensors and numeric arrays go to ``self.tensors`` and leave a reference."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.offsets: dict[int, tuple[dict[str, Any], Tensor]] = {}  # jagged columns of the same lengths share them

    def tensor(self, t: Tensor, name: str) -> dict[str, Any]:
        t = t.detach().cpu()
        if t.is_nested:
            values, offsets = _jagged_parts(t)
            if id(offsets) not in self.offsets:
                self.offsets[id(offsets)] = (self.tensor(offsets, f"{name}.offsets"), offsets)
            return {_TAG: "jagged", "parts": [self.tensor(values, f"{name}.values"), self.offsets[id(offsets)][0]]}
        while name in self.tensors:
            name += "_"
        # A copy, because safetensors refuses views and shared storage.
        self.tensors[name] = t.contiguous().clone()
        return {_TAG: "tensor", "name": name}

    def value(self, v: Any, where: str) -> Any:
        if v is None or type(v) in (bool, int, float, str):
            return v
        if type(v) is list:
            return [self.value(x, f"{where}[{i}]") for i, x in enumerate(v)]
        if type(v) is dict and all(type(k) is str for k in v) and _TAG not in v:
            return {k: self.value(x, f"{where}[{k!r}]") for k, x in v.items()}
        if isinstance(v, Tensor):
            return self.tensor(v, where)
        return self.tagged(v, where)

    def tagged(self, v: Any, where: str) -> dict[str, Any]:
        if type(v) is dict:
            pairs = [[self.value(k, f"{where} key"), self.value(x, f"{where}[{k!r}]")] for k, x in v.items()]
            return {_TAG: "dict", "pairs": pairs}
        if type(v) in (tuple, set, frozenset):
            return {_TAG: type(v).__name__, "items": [self.value(x, f"{where}[{i}]") for i, x in enumerate(v)]}
        if type(v) is bytes:
            return {_TAG: "bytes", "data": base64.b64encode(v).decode()}
        if isinstance(v, np.ndarray) and v.dtype == object:
            cells = [self.value(x, f"{where}[{i}]") for i, x in enumerate(v.ravel())]
            return {_TAG: "objects", "shape": list(v.shape), "cells": cells}
        if isinstance(v, np.ndarray | np.generic) and v.dtype.kind in "biufcSUmM":
            raw = torch.from_numpy(np.frombuffer(np.ascontiguousarray(v).tobytes(), dtype=np.uint8).copy())
            kind = "array" if isinstance(v, np.ndarray) else "scalar"
            return {_TAG: kind, "dtype": v.dtype.str, "shape": list(v.shape), "raw": self.tensor(raw, where)}
        raise UserError(f"cannot save {where}: a {type(v).__name__} is not plain data; drop the column or convert it")


class _Reader:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def value(self, v: Any) -> Any:
        if type(v) is list:
            return [self.value(x) for x in v]
        if type(v) is not dict:
            return v
        if _TAG not in v:
            return {k: self.value(x) for k, x in v.items()}
        return self.tagged(v)

    def tagged(self, v: dict[str, Any]) -> Any:
        kind = v[_TAG]
        if kind == "tensor":
            return self.tensors[v["name"]]
        if kind == "jagged":
            return from_parts(*(self.value(p) for p in v["parts"]))
        if kind == "dict":
            return {self.value(k): self.value(x) for k, x in v["pairs"]}
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.value, v["items"]))
        if kind == "bytes":
            return base64.b64decode(v["data"])
        if kind == "objects":
            out = np.empty(len(v["cells"]), dtype=object)
            for i, cell in enumerate(v["cells"]):
                out[i] = self.value(cell)
            return out.reshape(v["shape"])
        dtype = np.dtype(v["dtype"])
        if dtype.hasobject:
            raise UserError("the file names a dtype that holds objects")
        array = np.frombuffer(self.value(v["raw"]).numpy().tobytes(), dtype=dtype).reshape(v["shape"]).copy()
        return array if kind == "array" else array[()]


def save(data: DataProto, filepath: str | os.PathLike[str]) -> None:
    """Write ``data`` to ``filepath``: beside it first, then renamed, so a crash leaves no half file."""
    from safetensors.torch import save_file

    writer = _Writer()
    doc = {
        "version": 1,
        "batch_size": None if data.batch is None else list(data.batch.batch_size),
        "batch": {k: writer.tensor(t, k) for k, t in data._tensors().items()},
        "objects": writer.value(dict(data.non_tensor_batch), "non_tensor_batch"),
        "meta": writer.value(data.meta_info, "meta_info"),
    }
    text = json.dumps(doc).encode()
    writer.tensors[_HEADER] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    beside = f"{os.fspath(filepath)}.{os.getpid()}.tmp"
    try:
        save_file(writer.tensors, beside)
        with open(beside, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(beside, filepath)
    finally:
        if os.path.exists(beside):
            os.unlink(beside)


def load(filepath: str | os.PathLike[str]) -> DataProto:
    """Read ``filepath``. Raises UserError where it is not a file that ``save`` wrote."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(os.fspath(filepath))
        doc = json.loads(tensors.pop(_HEADER).numpy().tobytes())
        reader = _Reader(tensors)
        objects, meta = reader.value(doc["objects"]), reader.value(doc["meta"])
        columns = {k: reader.value(v) for k, v in doc["batch"].items()}
    except (SafetensorError, KeyError, ValueError, TypeError) as e:
        raise UserError(f"{filepath}: not a DataProto written by save_to_disk ({type(e).__name__}: {e})") from e
    batch = None
    if doc["batch_size"] is not None:
        from tensordict import TensorDict

        batch = TensorDict(columns, batch_size=torch.Size(doc["batch_size"]))
    return DataProto(batch, objects, meta)
