"""Calls on groups of one and four ranks, on both backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from podium.protocol import (
    Broadcast,
    DataProto,
    DataProtoFuture,
    PerRank,
)
from podium.utils.errors import UserError


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows) + 1}, {"name": [{"id": i} for i in range(rows)]}, {"step": 3})


def test_ranks_know_their_place(group):
    said = group.whoami()
    n = group.world_size
    assert [s["rank"] for s in said] == [(r, n, r, n) for r in range(n)]
    for rank, s in enumerate(said):
        assert (s["env"]["RANK"], s["env"]["WORLD_SIZE"]) == (str(rank), str(n))
        assert s["env"]["MASTER_PORT"] == said[0]["env"]["MASTER_PORT"]
    assert len({s["pid"] for s in said}) == n


def test_env_is_set_before_imports(many):
    assert [s["at_import"] for s in many.whoami()] == ["set"] * 4


def test_broadcast_and_rank_addressed_arguments_follow_from_type(group):
    n = group.world_size
    values = list(range(n))
    assert group.one_to_all(values) == [(r, values, None) for r in range(n)]
    assert group.one_to_all(PerRank(values), other=PerRank(values)) == [(r, r, r) for r in range(n)]
    assert group.all_to_all(values) == [(r, r) for r in range(n)]
    assert group.all_to_all(Broadcast(values)) == [(r, values) for r in range(n)]
    assert group.rank_zero(values) == (0, values)
    assert group.on_rank_zero() == 0
    with pytest.raises(ValueError, match="rank-addressed"):
        group.all_to_all([0] * (n + 1))


def test_dp_compute_and_metric(group):
    n = group.world_size
    assert group.dp_compute(list("abcd"[:n]), batch(2 * n)) == [(r, "abcd"[r], 2) for r in range(n)]
    assert group.metric(batch(4)) == [4 // n] * n
    assert group.awaited() == list(range(n))


@pytest.mark.parametrize("rows", [1, 4, 7, 8])
def test_proto_results_are_in_order_and_without_padding(group, rows):
    data = batch(rows)
    out = group.double(data, 3, names=["p", "q"])
    assert out.batch["y"].tolist() == [3 * (i + 1) for i in range(rows)]
    assert list(out.batch.keys()) == ["y"] and len(out.non_tensor_batch["who"]) == rows
    assert sum(out.meta_info["metrics"]["rows"]) == rows
    assert len(set(out.meta_info["metrics"]["sent"])) == 1
    assert out.meta_info["metrics"]["names"] == [["p", "q"]] * group.world_size


def test_worker_changes_no_columns_of_the_driver(group):
    data = batch(3)
    out = group.carry(data)
    assert list(data.batch.keys()) == ["x"] and data.batch["x"].tolist() == [1, 2, 3]
    assert "dispatch_valid" not in out._tensors() and sorted(out.batch["x"].tolist()) == [1, 1, 2, 2, 3, 3]
    assert out.meta_info == {"step": 3}
    out.batch["x"].zero_()


def test_broadcast_batch_is_each_ranks_own(many):
    data = DataProto.from_dict({"x": torch.zeros(100_000, dtype=torch.int64)})
    for _ in range(2):
        assert many.broadcast_batch(data) == [100_000 * (r + 1) for r in range(4)]
    assert int(data.batch["x"].sum()) == 0


def test_large_results_are_writable(many):
    out = many.double(DataProto.from_dict({"x": torch.ones(400_000)}))
    out.batch["y"].add_(1)
    assert float(out.batch["y"].sum()) == 3 * 400_000


def test_objects_only_and_meta_only(group):
    objects = DataProto.from_dict(non_tensors={"o": [[1, 2], {"a": float("nan")}, None]})
    out = group.apply(_same, objects)
    assert out == objects
    assert group.apply(_same, DataProto(meta_info={"k": 1})).meta_info == {"k": 1}
    with pytest.raises(UserError, match="0 rows"):
        group.double(batch(0))
    with pytest.raises(ValueError, match="different lengths"):
        group.dp_compute(batch(2), batch(4))


def _same(data):
    return data.select(batch_keys=[k for k in data._tensors() if k != "dispatch_valid"])


def test_function_argument(group):
    out = group.apply(lambda d: DataProto.from_dict({"x": d.batch["x"] + 10}), batch(4))
    assert out.batch["x"].tolist() == [11, 12, 13, 14]
    with pytest.raises(TypeError, match="must be a function"):
        group.apply(batch(4), batch(4))


def test_jagged_and_bfloat16_travel(group):
    ragged = torch.nested.nested_tensor([torch.arange(n) for n in (1, 5, 2)], layout=torch.jagged)
    data = DataProto.from_dict({"j": ragged, "h": torch.randn(3, 4).bfloat16(), "s": torch.randn(3, 5)[:, 1:3]})
    assert group.apply(_same, data) == data


def test_futures(group):
    first = group.double_later(batch(5))
    assert isinstance(first, DataProtoFuture)
    second = group.double_later(first)
    third = group.lazy(second)
    assert third.batch["x"].tolist() == [4 * (i + 1) for i in range(5)]
    assert first.get().batch["x"].tolist() == [2 * (i + 1) for i in range(5)] and first.done()
    both = DataProtoFuture.concat([first, second])
    assert len(both.get()) == 10
    assert [len(c.get()) for c in both.chunk(5)] == [2] * 5
    later = group.later()
    assert later.get(timeout_s=30) == list(range(group.world_size))


def test_future_crosses_groups(single, many):
    out = many.double(single.double_later(batch(3)))
    assert out.batch["y"].tolist() == [4, 8, 12]
    out = single.double(many.double_later(batch(3)))
    assert out.batch["y"].tolist() == [4, 8, 12]


def test_colocated_roles(four):
    assert [s["tag"] for s in four["critic"].whoami()] == ["c"] * 4
    assert four["whole"].critic_on_rank_zero() == 0
    assert four["echo"].sibling("critic") == [("c", r, False) for r in range(4)]
    assert four["echo"].sibling("rollout") == [None] * 4
    pids = [[s["pid"] for s in four[role].whoami()] for role in ("echo", "critic")]
    assert pids[0] == pids[1]
    with pytest.raises(UserError, match="no role"):
        four["whole"].spawn(["ref"])


def test_unknown_method_names_the_known(single):
    with pytest.raises(AttributeError, match=r"registered method 'nope'.*whoami"):
        single.nope()


def test_torch_distributed(four):
    assert four["dist"].total(5) == [26.0] * 4
    assert four["dist"].gather(batch(4)) == [[1, 2, 3, 4]] * 4


def test_meshes(four):
    group = four["mesh"]
    for rows in (4, 3):
        out = group.over_tp(batch(rows), [1, 2])
        assert out.batch["x"].tolist() == list(range(1, rows + 1))
        assert out.batch["rank"].tolist() == [0, 0, 2, 2][:rows]
        out = group.megatron(batch(rows), [1, 2])
        assert out.batch["x"].tolist() == list(range(1, rows + 1))
        assert out.batch["rank"].tolist() == [1, 1, 3, 3][:rows]
    assert group.sum_over_tp(batch(4), [1, 2]) == [(0, 3.0), (2, 7.0)]
    out = group.pp_as_dp(batch(4), every=np.zeros(4)).get()
    assert out.batch["rank"].tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match="nowhere"):
        group.unplaced(batch(4))
