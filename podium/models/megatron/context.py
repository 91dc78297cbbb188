"""Which tokens of a sequence a context-parallel rank holds."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch


def local_positions(bounds: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Indices (t / size,) int64, into t tokens of whole sequences, of those that one of `size` ranks holds.

    Each sequence is cut into 2 * size chunks, and rank r holds chunks r and 2 * size - 1 - r, in this order: under a
    causal mask, every rank has as many pairs of tokens to work on.

    Args:
        bounds: where sequences start, and the end of the last: n + 1 numbers. Lengths are multiples of 2 * size.
    """
    if size == 1:
        return torch.arange(bounds[0], bounds[-1])
    parts = []
    for start, stop in pairwise(bounds):
        chunk, rest = divmod(stop - start, 2 * size)
        assert rest == 0, f"a sequence of {stop - start} tokens does not divide into {2 * size} chunks"
        first, last = start + rank * chunk, stop - (rank + 1) * chunk
        parts += [torch.arange(first, first + chunk), torch.arange(last, last + chunk)]
    return torch.cat(parts)


@lru_cache(maxsize=16)  # each layer of a micro-batch asks for the same
def gathered_order(bounds: tuple[int, ...], size: int) -> torch.Tensor:
    """Indices (t,) int64 that put the ranks' tokens, laid end to end by rank, back into the order of the sequences."""
    return torch.cat([local_positions(bounds, size, rank) for rank in range(size)]).argsort()
