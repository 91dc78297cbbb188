"""Weights of a Megatron model from a Hugging Face directory, and back as whole tensors."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from podium.models.megatron.name_map import pieces, shaped_pieces
from podium.utils.device import device
from podium.utils.errors import UserError
from podium.utils.piece import Piece

if TYPE_CHECKING:
    from podium.models.megatron.model import Chunk

Box = tuple[tuple[int, ...], tuple[int, ...]]
# transformers holds the experts of a layer in one tensor in memory, and some programs write it as it is.
_EXPERT = re.compile(r"(?P<above>.*\.mlp\.experts\.)(?P<number>\d+)\.(?P<part>\w+)\.weight")
_FUSED = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint:
    """The tensors of a Hugging Face directory, read a box at a time.

    Raises:
        UserError: the directory has no safetensors.
    """

    def __init__(self, directory: str):
        self._directory = Path(directory)
        if (self._directory / _INDEX).is_file():
            self._files = json.loads((self._directory / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        elif (self._directory / _SINGLE).is_file():
            with self._open(_SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise UserError(
                f"{directory}: strategy=megatron reads safetensors, and there is neither {_SINGLE} nor {_INDEX}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of a tensor of `shape`, in the precision of the file.

        The file is opened for each: while it is mapped, the pages that were read count as this process's memory.

        Raises:
            UserError: there is no such tensor, or it has another shape.
        """
        part = tuple(slice(start, stop) for start, stop in zip(*box, strict=True))
        in_memory = name.replace(".block_sparse_moe.", ".mlp.")
        for candidate in (name, in_memory):
            if candidate in self._files:
                return self._read(candidate, part, shape)
        if expert := _EXPERT.fullmatch(in_memory):
            fused, stacked = _FUSED[expert["part"]]
            if expert["above"] + fused in self._files:
                return self._read_expert(expert["above"] + fused, int(expert["number"]), stacked, part, shape)
        raise UserError(f"{self._directory}: the weight {name} is not there; give a complete checkpoint")

    def _read_expert(
        self, name: str, number: int, stacked: int | None, part: tuple[slice, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """From a tensor of all experts of a layer, in which gate (0) lies on up (1)."""
        with self._open(self._files[name]) as file:
            experts = file.get_slice(name).get_shape()[0]
        rows, columns = part
        if stacked is not None:
            rows = slice(rows.start + stacked * shape[0], rows.stop + stacked * shape[0])
            shape = (2 * shape[0], shape[1])
        return self._read(name, (slice(number, number + 1), rows, columns), (experts, *shape))[0]

    def _read(self, name: str, part: tuple[slice, ...], shape: tuple[int, ...]) -> torch.Tensor:
        with self._open(self._files[name]) as file:
            tensor = file.get_slice(name)
            if tuple(tensor.get_shape()) != shape:
                raise UserError(
                    f"{self._directory}: {name} has shape {tensor.get_shape()}, and config.json makes it {list(shape)}"
                )
            return tensor[part]

    def _open(self, file: str) -> safe_open:
        try:
            return safe_open(str(self._directory / file), framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._directory / file}: does not open as safetensors ({error})") from None


@torch.no_grad()
def load(chunks: Sequence["Chunk"], directory: str) -> None:
    """Fills this rank's parameters. Each rank reads its own slices, one tensor at a time, and nothing else.

    A value head that the directory lacks stays at zero.

    Raises:
        UserError: a tensor is missing or has another shape than the config says.
    """
    checkpoint = Checkpoint(directory)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.zero_()  # the rows that round the vocabulary up have no tensor
    shaped = list(shaped_pieces(chunks))
    shapes = {piece.name: shape for piece, shape in shaped}
    for name, parts in _by_name([piece for piece, _ in shaped]).items():
        if name == "score.weight" and name not in checkpoint:
            continue
        box = _around(parts)
        whole = checkpoint.read(name, box, shapes[name])
        for part in parts:
            part.tensor.copy_(_cut(whole, part, box[0]))


@torch.no_grad()
def export(chunks: Sequence["Chunk"], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights, whole, on this rank's device, under their Hugging Face names, one at a time, alike on every rank.

    Collective over the world: every rank iterates to the end.
    """
    own = _by_name(pieces(chunks))
    sources = _sources({name: [(part.starts, part.stops) for part in parts] for name, parts in own.items()})
    for name, boxes_by_rank in sources.items():
        stops = [stop for boxes in boxes_by_rank.values() for _, stop in boxes]
        whole = torch.empty([max(sizes) for sizes in zip(*stops, strict=True)], dtype=dtype, device=device())
        for rank, boxes in boxes_by_rank.items():
            _fill(whole, rank, boxes, own.get(name, []))
        yield name, whole


def _fill(whole: torch.Tensor, rank: int, boxes: list[Box], own: list[Piece]) -> None:
    """Writes the boxes that `rank` holds into `whole`, on every rank; they travel as one flat message."""
    sizes = [torch.Size(stop - start for start, stop in zip(*box, strict=True)) for box in boxes]
    if rank == torch.distributed.get_rank():
        held = {(part.starts, part.stops): part.tensor for part in own}
        flat = torch.cat([held[box].to(whole.dtype).flatten() for box in boxes])
    else:
        flat = torch.empty(sum(size.numel() for size in sizes), dtype=whole.dtype, device=whole.device)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast(flat, src=rank)
    for box, size, values in zip(boxes, sizes, flat.split([size.numel() for size in sizes]), strict=True):
        whole[tuple(slice(start, stop) for start, stop in zip(*box, strict=True))] = values.view(size)


def _sources(own: dict[str, list[Box]]) -> dict[str, dict[int, list[Box]]]:
    """For each tensor, which rank gives which boxes: every box once, from the first rank that holds it."""
    everyone: list[dict[str, list[Box]]] = [own]
    if torch.distributed.get_world_size() > 1:
        everyone = [{}] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, own)
    sources: dict[str, dict[int, list[Box]]] = {}
    taken: set[tuple[str, Box]] = set()
    for rank, held in enumerate(everyone):
        for name, boxes in held.items():
            fresh = [box for box in boxes if (name, box) not in taken]
            taken.update((name, box) for box in fresh)
            if fresh:
                sources.setdefault(name, {})[rank] = fresh
    return sources


def _by_name(parts: list[Piece]) -> dict[str, list[Piece]]:
    grouped: dict[str, list[Piece]] = {}
    for part in parts:
        grouped.setdefault(part.name, []).append(part)
    return grouped


def _around(parts: list[Piece]) -> Box:
    """The smallest box that holds all the parts of a tensor."""
    starts = tuple(min(each) for each in zip(*(part.starts for part in parts), strict=True))
    return starts, tuple(max(each) for each in zip(*(part.stops for part in parts), strict=True))


def _cut(whole: torch.Tensor, part: Piece, origin: tuple[int, ...]) -> torch.Tensor:
    """A part's values, from a box that begins at `origin`."""
    return whole[tuple(slice(a - o, b - o) for a, b, o in zip(part.starts, part.stops, origin, strict=True))]
