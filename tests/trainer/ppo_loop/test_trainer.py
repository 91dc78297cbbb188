"""The layout of mini-batches; the loop itself runs in tests/e2e."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.protocol import DataProto
from podium.trainer.ppo.trainer import by_rank


@given(minis=st.integers(1, 4), per_rank=st.integers(1, 4), ranks=st.integers(1, 4))
def test_a_mini_batch_is_the_same_rows_for_any_number_of_ranks(minis, per_rank, ranks):
    mini_rows = per_rank * ranks
    batch = DataProto.from_dict({"row": torch.arange(minis * mini_rows)})
    shards = by_rank(batch, mini_rows, ranks).batch["row"].view(ranks, minis, per_rank)
    for mini in range(minis):
        rows = shards[:, mini].flatten().tolist()
        assert rows == list(range(mini * mini_rows, (mini + 1) * mini_rows))
