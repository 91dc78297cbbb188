"""Boxes in files: what one layout writes, any other reads."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podium.utils.errors import UserError
from podium.workers.engine.box_files import TensorBox, read_boxes, write_boxes

WHOLE = torch.arange(6 * 8.0).view(6, 8)


def grid(rows: int, columns: int, whole: torch.Tensor = WHOLE) -> list[TensorBox]:
    """The tensor cut into a grid, the last parts longer where it does not divide."""
    row_cuts = [i * (len(whole) // rows) for i in range(rows)] + [len(whole)]
    column_cuts = [i * (whole.shape[1] // columns) for i in range(columns)] + [whole.shape[1]]
    return [
        TensorBox("w", tuple(whole.shape), (top, left), whole[top:bottom, left:right].clone())
        for top, bottom in itertools.pairwise(row_cuts)
        for left, right in itertools.pairwise(column_cuts)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 6), st.integers(1, 8), st.integers(1, 3))
def test_any_cut_reads_what_any_other_wrote(tmp_path_factory, rows, columns, other_rows, other_columns, ranks):
    path = tmp_path_factory.mktemp("saved")
    written = grid(rows, columns)
    for rank in range(ranks):
        write_boxes(written[rank::ranks], path, rank)
    expected = grid(other_rows, other_columns)
    read = [TensorBox(b.name, b.shape, b.starts, torch.full_like(b.tensor, -1)) for b in expected]
    read_boxes(read, path)
    for box, other in zip(read, expected, strict=True):
        assert torch.equal(box.tensor, other.tensor)


def test_padding_is_cut_and_added(tmp_path: Path):
    """A vocabulary is padded for the ranks that split it."""
    write_boxes(grid(2, 1), tmp_path, 0)
    for rows in (4, 10):
        box = TensorBox("w", (rows, 8), (0, 0), torch.full((rows, 8), -1.0), may_be_padded=True)
        read_boxes([box], tmp_path)
        assert torch.equal(box.tensor[:6], WHOLE[:rows]) and not box.tensor[6:].any()


def test_a_scalar_and_an_empty_rank(tmp_path: Path):
    write_boxes([TensorBox("count", (), (), torch.tensor(3.0))], tmp_path, 0)
    write_boxes([], tmp_path, 1)
    box = TensorBox("count", (), (), torch.tensor(0.0))
    read_boxes([box], tmp_path)
    assert box.tensor == 3


def test_what_is_missing_or_other_is_refused(tmp_path: Path):
    write_boxes(grid(2, 1)[:1], tmp_path, 0)
    with pytest.raises(UserError, match="w is not whole"):
        read_boxes(grid(1, 1), tmp_path)
    with pytest.raises(UserError, match="has no v"):
        read_boxes([TensorBox("v", (1,), (0,), torch.zeros(1))], tmp_path)
    with pytest.raises(UserError, match=r"w has the shape \(6, 8\), the model's is \(6, 9\)"):
        read_boxes([TensorBox("w", (6, 9), (0, 0), torch.zeros(6, 9))], tmp_path)


def test_what_is_not_finite_is_not_written(tmp_path: Path):
    bad = grid(2, 1)
    bad[1].tensor[2, 3] = torch.nan
    with pytest.raises(OSError, match="1 of the 24 numbers of w are not finite"):
        write_boxes(bad, tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to(tmp_path: Path):
    with pytest.raises(OSError, match="nowhere"):
        write_boxes(grid(1, 1), tmp_path / "nowhere", 0)
