"""Flat buffers of which every rank of a group keeps an equal share."""

from collections.abc import Sequence
from typing import Any

import torch

_ALIGNMENT = 16  # bytes, of a share: whole elements of any dtype


class ShardedBuffer:
    """One rank's shares of some buffers, in one piece of host memory.

    A buffer of ``nbytes`` is cut in `count` shares of equal width, the last padded (or the last few: a buffer may be
    shorter than all its shares but one).

    Args:
        sizes: true bytes of each buffer.
        index, count: which share is this rank's, and of how many.
    """

    def __init__(self, sizes: Sequence[int], index: int, count: int):
        self._sizes, self._index, self._count = tuple(sizes), index, count
        widths = [share_width(nbytes, count) for nbytes in sizes]
        self._shares = torch.empty(sum(widths), dtype=torch.uint8).split(widths)

    def share(self, number: int) -> torch.Tensor:
        """This rank's share (uint8) of a buffer, to read or to fill."""
        return self._shares[number]

    def start_gather(self, number: int, group: Any) -> tuple[Any, torch.Tensor]:
        """Starts putting a buffer together; all ranks of the group call it for the same buffers in the same order.

        Returns:
            What to wait for (None where there is one share only), and the buffer, without padding, that it fills.
        """
        share = self._shares[number]
        if self._count == 1:
            return None, share[: self._sizes[number]]
        whole = torch.empty(len(share) * self._count, dtype=torch.uint8)
        return group._allgather_base(whole, share), whole[: self._sizes[number]]


def share_width(nbytes: int, count: int) -> int:
    """Bytes of each of `count` shares of a buffer."""
    return -(-nbytes // (count * _ALIGNMENT)) * _ALIGNMENT


def shares_of(whole: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """The shares of a buffer that is as long as all of them together."""
    return whole.split(len(whole) // count)
