"""Context-parallel parts of sequences."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.models.megatron.context import gathered_order, local_positions


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_ranks_hold_every_token_once_and_as_much_work_each(chunks: list[int], size: int):
    unit = 2 * size if size > 1 else 1
    bounds = [0, *torch.tensor(chunks).mul(unit).cumsum(0).tolist()]
    parts = [local_positions(bounds, size, rank) for rank in range(size)]
    laid_out = torch.cat(parts)
    assert laid_out.sort().values.tolist() == list(range(bounds[-1]))
    assert laid_out[gathered_order(tuple(bounds), size)].tolist() == list(range(bounds[-1]))
    starts = torch.cat([torch.full((stop - start,), start) for start, stop in pairwise(bounds)])
    pairs = [int((part - starts[part] + 1).sum()) for part in parts]
    assert len(set(pairs)) == 1, "under a causal mask, ranks have different numbers of pairs of tokens"
