"""A plan between any two layouts: everything wanted arrives once, from a rank that has it, and the senders share it."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.utils.errors import UserError
from podium.utils.piece import Piece
from podium.workers.weight_sync.boxes import Box, cells, itemsize
from podium.workers.weight_sync.plan import ReshardPlan
from podium.workers.weight_sync.stream import water_fill
from tests.workers.weight_sync.plan_checks import Pieces, points, run


@st.composite
def partitions(draw, shapes: dict[str, tuple[int, ...]], ranks: list[int], replicas: int, cover: bool) -> Pieces:
    """Each tensor cut by random planes into boxes, each box on 1 to `replicas` ranks (0 too, unless `cover`)."""
    pieces: Pieces = {rank: [] for rank in ranks}
    for name, shape in shapes.items():
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
        grid = [list(itertools.pairwise(cut)) for cut in cuts]
        for cell in np.ndindex(*(len(axis) for axis in grid)):
            spans = [axis[i] for axis, i in zip(grid, cell, strict=True)]
            box = Box(name, tuple(a for a, _ in spans), tuple(b for _, b in spans), dtype)
            for rank in draw(st.sets(st.sampled_from(ranks), min_size=int(cover), max_size=replicas)):
                pieces[rank].append(box)
    return pieces


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_everything_wanted_arrives_once_from_a_rank_that_has_it(data):
    shapes = data.draw(
        st.dictionaries(
            st.sampled_from("abcd"), st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4
        )
    )
    ranks = list(range(data.draw(st.integers(1, 6))))
    shift = data.draw(st.sampled_from([0, 2, 100]))  # the same ranks, some of them, none
    sources = data.draw(partitions(shapes, ranks, 3, cover=True))
    destinations = data.draw(partitions(shapes, [rank + shift for rank in ranks], 6, cover=False))
    plan = ReshardPlan.from_pieces(sources, destinations)
    run(plan, sources, destinations, shapes)
    for rank in destinations:  # what a rank has already never travels
        own = {(box.name, at) for box in sources.get(rank, []) for at in points(box)}
        for message in plan.receives(rank):
            for transfer in message.transfers:
                assert not own & {(transfer.name, at) for at in points(transfer)}


def test_overlapping_sources_are_used_once():
    sources = {0: [Box("w", (0, 0), (6, 4), "float32")], 1: [Box("w", (3, 0), (8, 4), "float32")]}
    destinations = {
        1: [Box("w", (0, 0), (8, 4), "float32")],
        2: [Box("w", (0, 1), (8, 3), "float32"), Box("w", (2, 3), (7, 4), "float32")],
    }
    plan = ReshardPlan.from_pieces(sources, destinations)
    run(plan, sources, destinations, {"w": (8, 4)})
    assert [message.numel for message in plan.receives(1)] == [12]  # rows 0 to 2: it has the others


def test_replicas_share_the_sending_to_within_a_row():
    rows = 1000
    boxes = [Box("w", (0, 0), (rows, 8), "bfloat16"), Box("v", (0,), (77,), "float32")]
    for receivers in (1, 3, 4, 7):
        plan = ReshardPlan.from_pieces(
            {rank: boxes for rank in range(4)}, {10 + rank: boxes for rank in range(receivers)}
        )
        sent = [sum(m.numel * itemsize(m.dtype) for m in plan.sends(rank)) for rank in range(4)]
        assert sum(sent) == receivers * (rows * 16 + 77 * 4)
        assert max(sent) - min(sent) <= 2 * 16
        pairs = Counter(
            m.source for rank in range(receivers) for m in plan.receives(10 + rank) if m.dtype == "bfloat16"
        )
        assert sum(pairs.values()) <= receivers + 4 - math.gcd(receivers, 4)


def test_a_replica_that_others_depend_on_sends_less_of_what_it_shares():
    """Rank 0 alone has `a`; `b` is on 0 and 1: 1 sends all of it."""
    a, b = Box("a", (0,), (100,), "float32"), Box("b", (0,), (100,), "float32")
    plan = ReshardPlan.from_pieces({0: [b, a], 1: [b]}, {2: [a, b]})
    assert [(m.source, m.numel) for m in plan.receives(2)] == [(0, 100), (1, 100)]


def test_both_sides_agree_whatever_the_order_of_ranks():
    shapes = {"w": (12, 5), "v": (9,)}
    boxes = [Box(name, (0,) * len(shape), shape, "float32") for name, shape in shapes.items()]
    forward = ReshardPlan.from_pieces({0: boxes, 1: boxes}, {5: boxes, 6: boxes, 7: boxes})
    backward = ReshardPlan.from_pieces({1: boxes, 0: boxes}, {7: boxes, 6: boxes, 5: boxes})
    for rank in (5, 6, 7):
        assert forward.receives(rank) == backward.receives(rank)
    everything = [message for rank in (5, 6, 7) for message in forward.receives(rank)]
    assert sorted(everything, key=str) == sorted((m for rank in (0, 1) for m in backward.sends(rank)), key=str)


@pytest.mark.parametrize(
    ("source", "destination", "wire"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
    ],
)
def test_the_narrower_dtype_travels(source, destination, wire):
    plan = ReshardPlan.from_pieces({0: [Box("w", (0,), (4,), source)]}, {1: [Box("w", (0,), (4,), destination)]})
    assert [message.dtype for message in plan.sends(0)] == [wire]


def test_what_no_source_has_is_named():
    sources = {0: [Box("w", (0, 0), (6, 4), "float32")]}
    with pytest.raises(UserError, match=r"^v: rank 3 wants \[0:2\], no source has any$"):
        ReshardPlan.from_pieces(sources, {3: [Box("v", (0,), (2,), "float32")]})
    with pytest.raises(UserError, match=r"^w: rank 3 wants \[4:8, 0:4\], no source has \[6:8, 0:4\]$"):
        ReshardPlan.from_pieces(sources, {3: [Box("w", (4, 0), (8, 4), "float32")]})


def test_boxes_that_cannot_be_told_apart_are_refused():
    box = Box("w", (0, 0), (6, 4), "float32")
    for other in (box, Box("w", (5, 3), (9, 9), "float32")):
        with pytest.raises(ValueError, match=r"rank 1 holds both .* overlap"):
            ReshardPlan.from_pieces({0: [box]}, {1: [box, other]})
    with pytest.raises(UserError, match=r"w: rank 0 has it in float32, rank 1 in bfloat16"):
        ReshardPlan.from_pieces({0: [box], 1: [Box("w", (0, 0), (6, 4), "bfloat16")]}, {})
    with pytest.raises(UserError, match="dtype 'complex64'"):
        ReshardPlan.from_pieces({0: [Box("w", (0,), (1,), "complex64")]}, {1: [Box("w", (0,), (1,), "float32")]})


def test_a_box_is_a_piece_without_its_memory():
    piece = Piece("w", (1, 0), (3, 4), torch.zeros(2, 4, dtype=torch.bfloat16))
    assert Box.of(piece) == Box("w", (1, 0), (3, 4), "bfloat16")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 400))
def test_water_fills_the_lowest_first(loads, amount):
    shares = water_fill(np.array(loads), amount)
    assert shares.sum() == amount
    assert (shares >= 0).all()
    level = (shares + loads)[shares > 0]
    assert not len(level) or level.max() - level.min() <= 1
    assert not len(level) or (np.array(loads)[shares == 0] >= level.max() - 1).all()


def test_cells_are_whole_or_absent_in_each_span():
    found = cells(((0, 0), (4, 4)), [((0, 0), (2, 9)), ((1, 2), (9, 4))])
    assert sum(math.prod(b - a for a, b in zip(*span, strict=True)) for span, _ in found) == 16
    assert dict(found)[(1, 2), (2, 4)] == (0, 1)
    assert dict(found)[(2, 0), (4, 2)] == ()
