"""What a checksum must notice, and what it must not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.utils.freed_memory import FreedMemory
from podium.workers.weight_sync.checksum import same_bits, tensor_checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def tensors(draw, min_size: int = 1) -> torch.Tensor:
    """Any bit patterns, NaN included."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(min_size, 30))
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    bits = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    return torch.frombuffer(bytearray(bits), dtype=dtype)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


@settings(deadline=None, max_examples=300)
@given(tensors(), st.data())
def test_any_flipped_bit_changes_it(tensor: torch.Tensor, data):
    index = data.draw(st.integers(0, len(tensor) - 1))
    bit = 0 if tensor.dtype is torch.bool else data.draw(st.integers(0, tensor.element_size() * 8 - 1))
    changed = tensor.clone()
    raw = changed.view(torch.uint8)
    raw[index * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    assert tensor_checksum(changed) != tensor_checksum(tensor)


@settings(deadline=None, max_examples=300)
@given(tensors(min_size=2), st.data())
def test_any_swap_of_different_elements_changes_it(tensor: torch.Tensor, data):
    i, j = data.draw(st.lists(st.integers(0, len(tensor) - 1), min_size=2, max_size=2, unique=True))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j].clone(), tensor[i].clone()
    equal = torch.equal(bits_of(tensor), bits_of(swapped))
    assert (tensor_checksum(swapped) == tensor_checksum(tensor)) == equal


@pytest.mark.parametrize("values", [(0.0, 5.0, 2.0), (1.0, 0.0, -1.0)])
def test_a_swap_of_doubles_whose_bits_differ_by_a_power_of_two(values: tuple[float, ...]):
    tensor = torch.tensor(values, dtype=torch.float64)
    assert tensor_checksum(tensor) != tensor_checksum(tensor.flip(0))


@settings(deadline=None, max_examples=100)
@given(tensors())
def test_strides_do_not_matter(tensor: torch.Tensor):
    expected = tensor_checksum(tensor.clone())
    spread = torch.stack([tensor, tensor.flip(0)], dim=1)
    assert tensor_checksum(spread[:, 0]) == expected
    square = tensor[:1].expand(3, 4)
    assert tensor_checksum(square) == tensor_checksum(square.contiguous()) == tensor_checksum(square.T.contiguous().T)
    assert expected >= 0


def test_position_counts_across_the_whole_tensor():
    large = torch.zeros(3 * 2**20 + 7)
    seen = set()
    for index in (0, 2**20 - 1, 2**20, 2**20 + 1, 2**21, len(large) - 1):
        large[index] = 1.0
        seen.add(tensor_checksum(large))
        large[index] = 0.0
    assert len(seen) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("distance", [1, 7, 8192, 16384, 65536, 3 * 65536])
def test_a_swap_is_found_at_any_distance_in_a_large_tensor(dtype: torch.dtype, distance: int):
    """Neighbours, a row and a chunk apart, and into what is left below the last whole row."""
    large = torch.arange(400_001, dtype=torch.int32).view(torch.float32).to(dtype)
    first = torch.randint(0, len(large) - distance, (5,), generator=torch.Generator().manual_seed(distance))
    for i in [*first.tolist(), len(large) - distance - 1]:
        swapped = large.clone()
        swapped[i], swapped[i + distance] = 1.0, 2.0
        other = large.clone()
        other[i], other[i + distance] = 2.0, 1.0
        assert tensor_checksum(swapped) != tensor_checksum(other)


def test_a_view_that_starts_between_words_gives_what_its_copy_gives():
    whole = torch.randn(200_000).bfloat16()
    assert tensor_checksum(whole[3:]) == tensor_checksum(whole[3:].clone())


def test_signs_and_nans_are_bits():
    zero, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    assert tensor_checksum(zero) != tensor_checksum(minus)
    nan = torch.tensor([float("nan")])
    assert tensor_checksum(nan) == tensor_checksum(nan.clone())
    assert tensor_checksum(torch.tensor(2.0)) == tensor_checksum(torch.tensor([2.0]))
    assert tensor_checksum(torch.empty(0)) == 0


@settings(deadline=None, max_examples=300)
@given(tensors(), st.data())
def test_the_same_bits_in_any_layout(tensor: torch.Tensor, data):
    """As rows at any offset of a larger tensor, transposed, without dimensions; and one flipped bit is seen."""
    rows = torch.stack([tensor, tensor.flip(0), tensor])
    offset = torch.cat([rows.new_zeros(data.draw(st.integers(0, 9))), rows.reshape(-1)])[-rows.numel() :].view_as(rows)
    for a, b in ((rows, offset), (rows[1:], offset[1:]), (rows.T, offset.T), (rows[0, 0], offset[0, 0])):
        assert same_bits(a, b) and same_bits(b, a)
    if tensor.dtype is not torch.bool:
        changed = offset.clone()
        byte = data.draw(st.integers(0, changed.nbytes - 1))
        changed.view(-1).view(torch.uint8)[byte] ^= 1 << data.draw(st.integers(0, 7))
        assert not same_bits(rows, changed) and not same_bits(changed.T, rows.T)


def test_the_memory_of_what_was_looked_at_can_be_given_back():
    """Weights that rest on the host between phases free theirs after a sync."""
    tensor = torch.ones(100)
    before = tensor_checksum(tensor)
    FreedMemory([tensor]).restore()
    assert tensor_checksum(tensor.fill_(1)) == before
