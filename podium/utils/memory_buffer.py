"""Parameters as views of flat memory: one buffer a dtype, each parameter at a 128-bit boundary of it.

What is flat travels in one message, moves between devices in one copy, and is cast or zeroed in one kernel. Names are
those that verl's users know.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from podium.utils.device import device

ALIGNMENT = 16
"""Bytes (128 bits): the widest load or store of a GPU thread, for which a parameter's start must be aligned."""

WeightBufferMeta = dict[str, dict[str, Any]]
"""Name of a parameter -> its ``shape`` (torch.Size) and ``dtype``, in the order in which they lie in memory."""


class MemoryBuffer:
    """Flat memory of one dtype, from which views are cut.

    Args:
        numel: elements, with the padding between parameters.
        numel_padded: elements to allocate, `numel` or more.
        source: memory to use, of `numel_padded` elements; None allocates zeros on this rank's device.
    """

    def __init__(self, numel: int, numel_padded: int, dtype: torch.dtype, source: torch.Tensor | None = None):
        assert numel <= numel_padded, f"{numel} elements in {numel_padded}"
        if source is None:
            source = torch.zeros(numel_padded, dtype=dtype, device=device())
        assert source.shape == (numel_padded,) and source.dtype == dtype, f"{tuple(source.shape)} {source.dtype}"
        self.numel, self.numel_padded, self.dtype, self.data = numel, numel_padded, dtype, source

    def zero(self) -> None:
        """Sets everything to 0."""
        self.data.zero_()

    def get(self, shape: torch.Size, start_index: int) -> torch.Tensor:
        """A view of `shape` that begins at element `start_index`."""
        stop = start_index + shape.numel()
        assert stop <= self.numel, f"elements {start_index} to {stop} of {self.numel}"
        return self.data[start_index:stop].view(shape)


def calc_padded_numel(shape: torch.Size, dtype: torch.dtype) -> int:
    """Elements that a tensor takes up in a buffer: rounded up to 128 bits, of any dtype."""
    elements = max(1, ALIGNMENT // dtype.itemsize)
    return -(-shape.numel() // elements) * elements


def get_weight_buffer_meta_from_module(module: torch.nn.Module) -> WeightBufferMeta:
    """Shapes and dtypes of a module's parameters, by name in alphabetical order. A shared parameter counts once."""
    return {name: {"shape": p.shape, "dtype": p.dtype} for name, p in sorted(module.named_parameters())}


def build_memory_buffer(weight_buffer_meta: WeightBufferMeta) -> dict[torch.dtype, MemoryBuffer]:
    """A zeroed buffer for each dtype, large enough for its parameters."""
    sizes: dict[torch.dtype, int] = {}
    for meta in weight_buffer_meta.values():
        sizes[meta["dtype"]] = sizes.get(meta["dtype"], 0) + calc_padded_numel(meta["shape"], meta["dtype"])
    return {dtype: MemoryBuffer(numel, numel, dtype) for dtype, numel in sizes.items()}


def build_memory_reference(
    weight_buffer_meta: WeightBufferMeta, memory_buffers: Mapping[torch.dtype, MemoryBuffer]
) -> dict[str, torch.Tensor]:
    """Each parameter as a view of the buffers that `build_memory_buffer` made for the same `weight_buffer_meta`."""
    return {
        name: memory_buffers[meta["dtype"]].get(meta["shape"], start)
        for name, meta, start in _places(weight_buffer_meta)
    }


@torch.no_grad()
def build_memory_reference_from_module(
    module: torch.nn.Module, memory_buffers: Mapping[torch.dtype, MemoryBuffer], maintain_weight: bool = True
) -> None:
    """Makes a module's parameters views of buffers that were built for its `get_weight_buffer_meta_from_module`.

    The parameters stay the same objects, so an optimizer that has them goes on.

    Args:
        maintain_weight: keep the parameters' values; otherwise they become what the buffers hold.
    """
    meta = get_weight_buffer_meta_from_module(module)
    parameters = dict(module.named_parameters())
    for name, view in build_memory_reference(meta, memory_buffers).items():
        if maintain_weight:
            view.copy_(parameters[name])
        parameters[name].data = view


def _places(weight_buffer_meta: WeightBufferMeta) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Where each parameter begins in the buffer of its dtype."""
    starts: dict[torch.dtype, int] = {}
    for name, meta in weight_buffer_meta.items():
        start = starts.get(meta["dtype"], 0)
        yield name, meta, start
        starts[meta["dtype"]] = start + calc_padded_numel(meta["shape"], meta["dtype"])
