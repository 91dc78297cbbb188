"""Boxes of whole tensors in safetensors files: each rank writes what it answers for, any layout reads what it needs.

A file holds the boxes of one rank; its header says of each which tensor it is of, where it starts there, and the shape
of the whole. Nothing in it is code.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from podium.utils.errors import UserError
from podium.workers.engine.finite import require_finite

_KEY = "boxes"
# safetensors lays a file out in memory before it writes it.
_FILE_BYTES = 2**31


@dataclass(frozen=True)
class TensorBox:
    """A part of a whole tensor, with the memory that holds it or is to be filled with it."""

    name: str
    """Of the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    starts: tuple[int, ...]
    tensor: torch.Tensor
    """As many dimensions as the whole has."""
    may_be_padded: bool = False
    """The whole may end sooner in a file, or later: what is beyond is padding, which is filled with zeros."""


def write_boxes(boxes: Sequence[TensorBox], path: Path, rank: int) -> None:
    """Writes one rank's boxes, as ``shard-RANK-of-FILE.safetensors`` in a folder that exists.

    Raises:
        OSError: they could not be written, or one holds a number that is not finite.
    """
    require_finite((box.name, box.tensor) for box in boxes)
    for number, part in enumerate(_parts(boxes), 1):
        header = {str(i): {"name": b.name, "shape": b.shape, "starts": b.starts} for i, b in enumerate(part)}
        tensors = {str(i): box.tensor.contiguous() for i, box in enumerate(part)}
        try:
            save_file(tensors, path / f"shard-{rank:05}-{number:05}.safetensors", {_KEY: json.dumps(header)})
        except Exception as error:  # safetensors has its own, with the system's in its text
            raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def read_boxes(boxes: Sequence[TensorBox], path: Path) -> None:
    """Fills every box from the files of any layout.

    Raises:
        UserError: a tensor is not there, not whole, or of another shape.
    """
    saved = _index(path)
    opened: dict[Path, Any] = {}
    for box in boxes:
        parts = saved.get(box.name)
        if not parts:
            raise UserError(f"{path} has no {box.name}: it is the checkpoint of another model")
        if parts[0].shape != box.shape and not box.may_be_padded:
            raise UserError(
                f"{path}: {box.name} has the shape {parts[0].shape}, the model's is {box.shape}: it is of another model"
            )
        if box.may_be_padded:
            box.tensor.zero_()
        filled = 0
        for part in parts:
            meeting = _meet(part, box)
            if meeting is None:
                continue
            there, here = meeting
            if part.file not in opened:
                opened[part.file] = safe_open(part.file, framework="pt")
            target = box.tensor[here]
            target.copy_(
                opened[part.file].get_slice(part.key)[there] if there else opened[part.file].get_tensor(part.key)
            )
            filled += target.numel()
        if filled != _wanted(box, parts[0].shape):
            raise UserError(f"{path}: {box.name} is not whole: files of some ranks are missing, or of several saves")


@dataclass(frozen=True)
class _Saved:
    file: Path
    key: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def _index(path: Path) -> dict[str, list[_Saved]]:
    index: dict[str, list[_Saved]] = {}
    for file in sorted(path.glob("shard-*.safetensors")):
        with safe_open(file, framework="pt") as content:
            for key, about in json.loads(content.metadata()[_KEY]).items():
                sizes = tuple(content.get_slice(key).get_shape())
                part = _Saved(file, key, tuple(about["shape"]), tuple(about["starts"]), sizes)
                index.setdefault(about["name"], []).append(part)
    return index


def _meet(part: _Saved, box: TensorBox) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What both have, as slices of the one and of the other."""
    there, here = [], []
    for start, size, other, length in zip(part.starts, part.sizes, box.starts, box.tensor.shape, strict=True):
        low, high = max(start, other), min(start + size, other + length)
        if low >= high:
            return None
        there.append(slice(low - start, high - start))
        here.append(slice(low - other, high - other))
    return tuple(there), tuple(here)


def _wanted(box: TensorBox, saved: tuple[int, ...]) -> int:
    """Elements of the box that the whole tensor of the files has."""
    count = 1
    for start, length, end in zip(box.starts, box.tensor.shape, saved, strict=True):
        count *= max(0, min(start + length, end) - start)
    return count


def _parts(boxes: Sequence[TensorBox]) -> Iterator[list[TensorBox]]:
    """Boxes for one file after the other; one, empty, where there are none."""
    part: list[TensorBox] = []
    size = 0
    for box in boxes:
        if part and size + box.tensor.nbytes > _FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(box)
        size += box.tensor.nbytes
    yield part
