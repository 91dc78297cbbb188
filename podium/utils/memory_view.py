"""The bytes of a tensor, where they are."""

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; it stays as long as the view is in use.

    Not by way of numpy, for which torch marks the storage as one that can never be resized: that is how weights that
    rest between their phases give their memory back (`podium.utils.freed_memory`).
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
