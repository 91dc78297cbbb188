"""A checksum of a tensor's bits that knows where each element stands."""

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 20


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Sum of every element's bits times an odd weight of its position, modulo 2**64.

    Any single changed element changes it, and so does swapping two different ones. Bit-equal tensors of the same
    shape agree whatever their strides or device. Elements of 8 bytes give two such sums in one number, one of their low
    halves and one of their high ones: in a single sum, a difference of 2**62 two positions apart would vanish.
    """
    flat = tensor.detach().reshape(-1)
    if flat.element_size() == 8:
        halves = flat.clone(memory_format=torch.contiguous_format).view(torch.int32)
        return _weighted_sum(halves[0::2]) + (_weighted_sum(halves[1::2]) << 64)
    return _weighted_sum(flat.view(_INTEGER_OF_SIZE[flat.element_size()]))


def _weighted_sum(bits: torch.Tensor) -> int:
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + part.numel(), device=part.device) * 2 + 1
        total += int((part * weights).sum())
    return total % 2**64
