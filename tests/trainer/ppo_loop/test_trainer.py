"""The layout of mini-batches; the loop itself runs in tests/e2e."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.protocol import DataProto
from podium.trainer.ppo.trainer import by_shard


@given(minis=st.integers(1, 4), per_shard=st.integers(1, 4), shards=st.integers(1, 4))
def test_a_mini_batch_is_the_same_rows_for_any_number_of_shards(minis, per_shard, shards):
    mini_rows = per_shard * shards
    batch = DataProto.from_dict({"row": torch.arange(minis * mini_rows)})
    shards = by_shard(batch, mini_rows, shards).batch["row"].view(shards, minis, per_shard)
    for mini in range(minis):
        rows = shards[:, mini].flatten().tolist()
        assert rows == list(range(mini * mini_rows, (mini + 1) * mini_rows))
