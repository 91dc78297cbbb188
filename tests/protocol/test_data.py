"""DataProto where it must differ from what users were hurt by, and the small print of each method."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from podium.protocol import (
    DataProto,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
)
from podium.protocol.sharding import drop_padding, real_rows, shard
from podium.utils.errors import UserError


def batch(rows: int = 4) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows * 2).reshape(rows, 2), "m": torch.ones(rows, dtype=torch.bool)},
        {"o": [{"i": i, "list": [i]} for i in range(rows)]},
        {"step": 1, "nested": {"a": [1]}},
    )


def test_constructors_leave_their_arguments_alone():
    tensors, objects, meta = {"x": torch.zeros(2)}, {"o": [[1, 2], [3, 4]]}, {"k": 1}
    data = DataProto.from_dict(tensors, objects, meta)
    data.batch["y"] = torch.zeros(2)
    data.pop(["x"], ["o"], ["k"])
    assert list(tensors) == ["x"] and objects == {"o": [[1, 2], [3, 4]]} and meta == {"k": 1}
    td = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    DataProto(td).rename("x", "y")
    assert list(td.keys()) == ["x"]
    single = {"x": torch.zeros(2), "o": np.array([1, 2], dtype=object)}
    DataProto.from_single_dict(single).pop(["x"])
    assert list(single) == ["x", "o"]


def test_rows_of_lists_stay_rows():
    data = DataProto.from_dict(non_tensors={"o": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["o"].shape == (2,) and data[1].non_tensor_batch["o"] == [3, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.chunk(2)[0],
        lambda d: d.select(),
        lambda d: d.slice(0, 2),
        lambda d: d.repeat(2),
        lambda d: d[[0, 1]],
    ],
    ids=["chunk", "select", "slice", "repeat", "index"],
)
def test_meta_info_is_never_shared(make):
    data = batch()
    other = make(data)
    other.meta_info["nested"]["a"].append(2)
    other.meta_info["new"] = 1
    assert data.meta_info == {"step": 1, "nested": {"a": [1]}}


def test_repeated_rows_are_rows_of_their_own():
    for data in (
        batch().repeat(3),
        batch().repeat(3, interleave=False),
        batch()[[0, 0, 0]],
        batch().sample_level_repeat([3, 0, 0, 0]),
    ):
        data.non_tensor_batch["o"][0]["list"].append("written")
        assert sum("written" in row["list"] for row in data.non_tensor_batch["o"]) == 1
    source = batch()
    source.repeat(2).non_tensor_batch["o"][0]["i"] = "written"
    assert source.non_tensor_batch["o"][0]["i"] == 0


def test_indexing():
    data = batch()
    item = data[-1]
    assert (
        isinstance(item, DataProtoItem) and item.batch["x"].tolist() == [6, 7] and item.non_tensor_batch["o"]["i"] == 3
    )
    assert len(list(data)) == 4 and len(data[1:3]) == 2 and len(data[::2]) == 2 and len(data[3:1]) == 0
    for index in ([0, -1], np.array([0, 3]), torch.tensor([0, 3]), torch.tensor([True, False, False, True])):
        assert data[index].batch["x"][:, 0].tolist() == [0, 6]
    for wrong in ([4], [-5], [True]):
        with pytest.raises(IndexError):
            data[wrong]
    with pytest.raises(IndexError):
        data[4]
    assert len(data[[]]) == 0


def test_chunk_sizes_differ_by_at_most_one():
    assert [len(c) for c in batch(5).chunk(3)] == [2, 2, 1]
    for wrong in (0, 6):
        with pytest.raises(ValueError, match="5 rows into"):
            batch(5).chunk(wrong)
    assert [len(c) for c in batch(5).split(2)] == [2, 2, 1]


def test_concat():
    with pytest.raises(ValueError, match="at least one"):
        DataProto.concat([])
    a, b = batch(1), batch(2)
    a.meta_info |= {"lengths": np.array([1.0, np.nan]), "metrics": {"loss": 1.0}}
    b.meta_info |= {"lengths": np.array([1.0, np.nan]), "metrics": {"loss": 2.0, "kl": 0.1}}
    whole = DataProto.concat([a, b])
    assert len(whole) == 3 and whole.meta_info["metrics"] == {"loss": [1.0, 2.0], "kl": [0.1]}
    b.meta_info["lengths"] = np.array([2.0])
    with pytest.raises(ValueError, match="'lengths' of batch 1"):
        DataProto.concat([a, b])
    with pytest.raises(ValueError, match="'m'"):
        DataProto.concat([batch(1), batch(1).select(["x"], meta_info_keys=[])])


def test_union():
    nan = torch.tensor([1.0, float("nan")])
    a = DataProto.from_dict({"x": nan.clone()}, {"o": [float("nan"), 1]}, {"v": float("nan")})
    b = DataProto.from_dict({"x": nan.clone(), "y": nan}, {"o": [float("nan"), 1]}, {"v": float("nan")})
    assert set(a.union(b).batch.keys()) == {"x", "y"}
    objects = DataProto.from_dict(non_tensors={"p": [1, 2]})
    assert set(a.select().union(objects).non_tensor_batch) == {"o", "p"}
    assert set(objects.union(a).batch.keys()) == {"x", "y"}
    with pytest.raises(ValueError, match="'x'"):
        a.union(DataProto.from_dict({"x": torch.zeros(2)}))
    with pytest.raises(ValueError, match="2 rows with one of 3"):
        a.union(DataProto.from_dict({"z": torch.zeros(3)}))
    assert union_tensor_dict(None, a.batch)["x"] is a.batch["x"] and union_tensor_dict(None, None) is None
    assert union_numpy_dict({}, {"a": np.zeros(1)})["a"] == 0


def test_select_pop_rename():
    data = batch()
    assert list(data.select(["x"]).batch.keys()) == ["x"] and "o" in data.select(["x"]).non_tensor_batch
    with pytest.raises(KeyError, match=r"no 'z' in batch.*'m', 'x'"):
        data.select(["z"])
    copied = data.select(deepcopy=True)
    copied.batch["x"].zero_()
    copied.non_tensor_batch["o"][0]["i"] = 9
    assert data.batch["x"].sum() == 28 and data.non_tensor_batch["o"][0]["i"] == 0
    with pytest.raises(KeyError):
        data.pop(["x", "z"])
    out = data.pop(["x"], ["o"], ["step"])
    assert list(data.batch.keys()) == ["m"] and not data.non_tensor_batch and "step" not in data.meta_info
    assert list(out.batch.keys()) == ["x"] and out.meta_info == {"step": 1}
    assert list(data.rename("m", "mask").batch.keys()) == ["mask"]
    with pytest.raises(ValueError, match="1 old names and 2"):
        data.rename(["mask"], ["a", "b"])
    assert len(batch().pop(non_tensor_batch_keys=["o"])) == 4


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="column 'y' has batch size"):
        DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(3)})
    with pytest.raises(ValueError, match="object column 'o' has 3 rows"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"o": [1, 2, 3]})
    with pytest.raises(ValueError, match="is a list"):
        DataProto.from_single_dict({"x": [1]})


def test_iterator():
    data = batch(6)
    runs = [
        [b.batch["x"][:, 0].tolist() for b in data.make_iterator(2, 2, seed=1, dataloader_kwargs={"shuffle": True})]
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(runs[0]) == 6
    assert sorted(x for run in runs[0][:3] for x in run) == [0, 2, 4, 6, 8, 10] and runs[0][:3] != runs[0][3:]
    assert [b.batch["x"][0, 0].item() for b in data.make_iterator(3, 1)] == [0, 6]
    with pytest.raises(ValueError, match="does not divide"):
        data.make_iterator(4, 1)


def test_unfold_fold_and_collate():
    data = batch(2)
    wide = DataProto.from_dict(
        {"x": torch.arange(8).reshape(2, 4), "y": torch.tensor([5, 6])}, {"o": [{"a": 1}, {"a": 2}]}
    )
    tall = wide.unfold_column_chunks(2, ["x"])
    assert tall.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and tall.batch["y"].tolist() == [5, 5, 6, 6]
    with pytest.raises(ValueError, match="multiple of 3"):
        wide.unfold_column_chunks(3, ["x"])
    assert unfold_batch_dim(fold_batch_dim(batch(4), 2)) == batch(4)
    with pytest.raises(ValueError, match="4 rows into 3"):
        fold_batch_dim(batch(4), 3)
    collated = collate_fn(list(data))
    assert collated == data.select(meta_info_keys=[])
    assert list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}


def test_pad_repeats_more_than_once():
    padded, extra = pad_dataproto_to_divisor(batch(2), 7)
    assert extra == 5 and padded.batch["x"][:, 0].tolist() == [0, 2, 0, 2, 0, 2, 0]
    padded.non_tensor_batch["o"][2]["i"] = "written"
    assert padded.non_tensor_batch["o"][0]["i"] == 0


def test_info_without_tensors(capsys):
    data = DataProto.from_dict(non_tensors={"o": [1]}, meta_info={"a": 1})
    assert "o: (1,)" in data.get_data_info() and "x: (4, 2)" in batch().get_data_info()
    data.print_size("here")
    assert "here, Size of tensordict: 0.0 GB" in capsys.readouterr().out


def test_pickle_takes_only_its_own_bytes():
    base = torch.zeros(1000, 1000)
    data = DataProto.from_dict({"x": base[10:12]}, {"o": [{"t": base[0]}, {"t": base[1]}]}, {"t": base[:1]})
    buffers: list = []
    main = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(main) < 4000 and sum(b.raw().nbytes for b in buffers) == 4 * 1000 * (2 + 2 + 1)
    assert pickle.loads(main, buffers=buffers) == data
    assert len(pickle.dumps(data)) < 30_000
    # No copy on the way out: the buffer is the tensor's own memory.
    assert np.frombuffer(buffers[0].raw(), dtype=np.uint8).ctypes.data == base[10].data_ptr()


def test_copy_and_deepcopy():
    data = batch()
    copy.copy(data).batch["new"] = torch.zeros(4)
    copy.deepcopy(data).batch["x"].zero_()
    assert "new" not in data._tensors() and data.batch["x"].sum() == 28


def test_disk_refuses_code_and_says_where(tmp_path):
    path = tmp_path / "batch"
    with pytest.raises(UserError, match=r"\['o'\]\[0\]\['f'\]: a function is not plain data"):
        DataProto.from_dict(
            non_tensors={"o": [{"f": (lambda: 0).__class__(compile("0", "", "eval"), {})}]}
        ).save_to_disk(str(path))
    assert not list(tmp_path.iterdir())
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UserError, match="not a DataProto"):
        DataProto.load_from_disk(str(path))
    odd = DataProto.from_dict(
        {"x": torch.zeros(2, 3)[:, 1:]},
        {"o": [(1, b"\0"), {3: {"a"}, "__podium__": np.float32(1.5)}], "n": np.array([1, 2])},
        {"t": torch.ones(2), "a": np.array(["é", "b"])},
    )
    odd.save_to_disk(str(path))
    assert DataProto.load_from_disk(str(path)) == odd


@pytest.mark.parametrize(("rows", "n"), [(5, 4), (2, 4), (1, 3), (7, 2)])
def test_shards_are_equal_and_marked(rows, n):
    shards = shard(batch(rows), n)
    sizes = {len(s) for s in shards}
    assert len(sizes) == 1 and all("dispatch_valid" in s._tensors() for s in shards)
    assert sum(int(s.batch["dispatch_valid"].sum()) for s in shards) == rows
    back = [drop_padding(DataProto.from_dict({"x": s.batch["x"]}), real_rows([s])) for s in shards]
    assert torch.cat([b.batch["x"] for b in back]).equal(batch(rows).batch["x"])
    carried = [drop_padding(s, real_rows([s])) for s in shards]
    assert DataProto.concat(carried) == batch(rows)
    with pytest.raises(ValueError, match="cannot tell which are padding"):
        drop_padding(DataProto.from_dict({"x": torch.zeros(3)}), (1, 2))


def test_even_shards_carry_no_column():
    assert all("dispatch_valid" not in s._tensors() for s in shard(batch(4), 2))
