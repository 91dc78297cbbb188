"""A bucket as messages: what is sent from the memory where it lies, and what is packed."""

import pytest
import torch

from podium.utils.piece import Piece
from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.lane import Bucket, Views, lanes_of
from podium.workers.weight_sync.plan import ReshardPlan
from podium.workers.weight_sync.stream import Part

LARGE, SMALL = 600, 7  # rows of 256 columns of float32


def part(name: str, rows: int, first: int = 0) -> Part:
    return Part(name, ((first, 0), (first + rows, 256)), "float32")


def piece(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, (0, 0), tuple(tensor.shape), tensor)


def test_large_parts_travel_alone_and_the_others_together():
    parts = part("a", SMALL), part("b", LARGE), part("c", SMALL), part("d", LARGE)
    alone, also_alone, rest = Bucket(torch.float32, parts).messages
    assert (alone.parts, also_alone.parts, rest.parts) == ((parts[1],), (parts[3],), (parts[0], parts[2]))
    assert [message.parts for message in Bucket(torch.float32, parts[1:2]).messages] == [(parts[1],), ()]


def test_only_what_lies_as_it_travels_is_sent_from_where_it_is():
    whole, wide = torch.randn(LARGE + 20, 256), torch.randn(LARGE, 512)
    pieces = {"whole": whole, "columns": wide[:, :256], "narrow": torch.randn(LARGE, 256).bfloat16()}
    views = Views([piece(name, tensor) for name, tensor in pieces.items()])
    rows = Bucket(torch.float32, (part("whole", LARGE, 20),))
    lying = rows.in_place(views)
    assert lying is not None and lying.data_ptr() == whole[20:].data_ptr() and len(lying) == rows.nbytes
    for name in ("columns", "narrow"):
        assert Bucket(torch.float32, (part(name, LARGE),)).in_place(views) is None
    assert Bucket(torch.float32, (part("whole", SMALL),)).in_place(views) is None


def test_an_empty_rest_is_packed_without_harm():
    rest = Bucket(torch.float32, (part("whole", LARGE),)).messages[-1]
    empty = torch.empty(0, dtype=torch.uint8)
    rest.pack(Views([]), empty)
    rest.unpack(empty, Views([]))
    assert rest.nbytes == 0 == rest.checksum(empty)


@pytest.mark.parametrize(
    ("megabytes", "buckets"), [(1, 1), (4, 1), (8, 2), (16, 4), (24, 4), (64, 4), (80, 5), (160, 10)]
)
def test_what_is_less_than_a_few_buckets_is_cut_so_that_both_ends_work(megabytes: int, buckets: int):
    """Rows of 1 KiB, buckets of 16 MiB."""
    rows = megabytes << 10
    box = Box("w", (0, 0), (rows, 256), "float32")
    plan = ReshardPlan.from_pieces({0: [box]}, {1: [box]})
    [lane] = lanes_of(plan, 1, 16 << 20)
    assert len(lane.buckets) == buckets and lane.nbytes == megabytes << 20
    assert max(bucket.nbytes for bucket in lane.buckets) <= 16 << 20
