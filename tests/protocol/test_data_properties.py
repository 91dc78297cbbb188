"""What must hold for every batch: with and without tensors, NaN, bf16, jagged and object columns, zero and one row."""

from __future__ import annotations

import math
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podium.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

settings.register_profile("protocol", deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
settings.load_profile("protocol")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64]
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=5,
)


@st.composite
def batches(draw, min_rows: int = 0) -> DataProto:
    rows = draw(st.integers(min_rows, 9))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = {}
    for i, dtype in enumerate(draw(st.lists(st.sampled_from(DTYPES), max_size=3))):
        shape = (rows, *draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)])))
        t = (torch.randn(shape, generator=rng) * 10).to(dtype)
        if dtype.is_floating_point and draw(st.booleans()):
            t[torch.rand(shape, generator=rng) < 0.3] = math.nan
        # A view of something larger half of the time.
        tensors[f"t{i}"] = torch.cat([t, t])[rows:] if draw(st.booleans()) else t
    if rows and draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
        offsets = torch.tensor([0, *np.cumsum(lengths)])
        values = torch.randn(int(offsets[-1]), generator=rng)
        tensors["j"] = torch.nested.nested_tensor_from_jagged(values, offsets)
        tensors["k"] = torch.nested.nested_tensor_from_jagged(values.bfloat16(), offsets)
    objects = {}
    for i in range(draw(st.integers(0 if tensors else 1, 2))):
        objects[f"o{i}"] = draw(st.lists(plain, min_size=rows, max_size=rows))
    meta = draw(st.dictionaries(st.sampled_from(["a", "b"]), plain, max_size=2))
    if draw(st.booleans()):
        meta["array"] = np.array([1.0, math.nan])
    return DataProto.from_dict(tensors, objects, meta)


@given(batches(), st.data())
def test_concat_undoes_chunk_and_split(x, data):
    n = data.draw(st.integers(1, max(1, len(x))))
    assert DataProto.concat(x.chunk(n)) == x
    if len(x):
        assert DataProto.concat(x.split(n)) == x


@given(batches(min_rows=1), st.integers(1, 12))
def test_unpad_undoes_pad(x, k):
    padded, extra = pad_dataproto_to_divisor(x, k)
    assert len(padded) % k == 0 and len(padded) - len(x) == extra < k
    assert unpad_dataproto(padded, extra) == x


@given(batches(), st.randoms(use_true_random=False))
def test_reorder_by_a_permutation_and_its_inverse(x, random):
    order = list(range(len(x)))
    random.shuffle(order)
    y = x.select()
    y.reorder(order)
    y.reorder(np.argsort(np.array(order, dtype=np.int64)))
    assert y == x


@given(batches())
def test_tensordict_round_trip(x):
    assert DataProto.from_tensordict(x.to_tensordict()) == x


@given(batches())
def test_pickle_round_trip(x):
    buffers: list = []
    main = pickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    assert pickle.loads(main, buffers=[bytes(b.raw()) for b in buffers]) == x
    assert pickle.loads(pickle.dumps(x, protocol=4)) == x


@given(batches())
def test_disk_round_trip(x):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "batch")
        x.save_to_disk(path)
        assert DataProto.load_from_disk(path) == x


@given(batches(), st.integers(1, 3), st.booleans())
def test_repeat_is_indexing(x, times, interleave):
    rows = np.arange(len(x))
    index = rows.repeat(times) if interleave else np.tile(rows, times)
    assert x.repeat(times, interleave) == x[index]
    if interleave:
        assert x.sample_level_repeat([times] * len(x)) == x[index]


@given(batches())
def test_union_with_a_copy_changes_nothing(x):
    assert x.select(deepcopy=True).union(x.select(deepcopy=True)) == x


def test_jagged_columns_that_shared_lengths_still_do(tmp_path):
    offsets = torch.tensor([0, 2, 3, 6])
    a, b = (torch.nested.nested_tensor_from_jagged(torch.randn(6), offsets) for _ in range(2))
    x = DataProto.from_dict({"a": a, "b": b})
    x.save_to_disk(str(tmp_path / "x"))
    loaded = [DataProto.load_from_disk(str(tmp_path / "x")), pickle.loads(pickle.dumps(x))]
    for y in (*loaded, *x.chunk(2), x[[2, 0]], x.repeat(2), DataProto.concat(x.chunk(3))):
        assert len(y) and (y.batch["a"] * y.batch["b"]).size(0) == len(y)


def test_equality_sees_differences():
    x = DataProto.from_dict({"a": torch.tensor([1.0, math.nan])}, {"o": [1, 2]}, {"m": 1})
    for other in (
        DataProto.from_dict({"a": torch.tensor([1.0, 2.0])}, {"o": [1, 2]}, {"m": 1}),
        DataProto.from_dict({"a": torch.tensor([1.0, math.nan])}, {"o": [1, 3]}, {"m": 1}),
        DataProto.from_dict({"a": torch.tensor([1.0, math.nan])}, {"o": [1, 2]}, {"m": 2}),
        x.select([]),
    ):
        assert x != other
    with pytest.raises(TypeError):
        hash(x)
