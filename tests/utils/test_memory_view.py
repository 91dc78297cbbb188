"""A tensor's bytes: the same memory, kept as long as needed, and no chain on its storage."""

import gc

import pytest
import torch

from podium.utils.freed_memory import FreedMemory
from podium.utils.memory_view import bytes_of


@pytest.mark.parametrize(
    "tensor", [torch.arange(7.0), torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.empty(0)]
)
def test_it_is_the_tensors_own_memory(tensor: torch.Tensor):
    view = bytes_of(tensor)
    assert view.nbytes == tensor.nbytes and bytes(view) == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    if tensor.numel():
        view[:] = bytes(tensor.nbytes)
        assert not tensor.any()


def test_it_starts_where_the_tensor_does():
    whole = torch.arange(10, dtype=torch.uint8)
    assert bytes(bytes_of(whole[3:5])) == b"\x03\x04"


def test_a_part_of_it_keeps_the_memory():
    view = bytes_of(torch.full((1 << 20,), 7, dtype=torch.uint8))[100:]
    gc.collect()
    others = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(8)]
    assert set(bytes(view[:1000])) == {7} and len(others) == 8


def test_the_memory_can_still_be_given_back():
    tensor = torch.ones(5)
    bytes_of(tensor)
    freed = FreedMemory([tensor])
    freed.restore()
    assert not tensor.any()
