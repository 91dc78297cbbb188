import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.utils.data_files import RowReader
from podium.utils.errors import UserError

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}, {"prompt": "c", "n": 3}]


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("write", "name"), [(parquet, "x.parquet"), (jsonl, "x.jsonl"), (jsonl, "x.json")])
def test_rows_come_back_as_written(tmp_path, write, name):
    reader = RowReader(write(tmp_path / name, ROWS), key="data.train_files")
    assert [reader[i] for i in range(len(reader))] == ROWS
    assert list(reader.column("n")) == [1, 2, 3]
    with pytest.raises(IndexError):
        reader[3]


def test_several_files_are_one_and_columns_that_lack_are_none(tmp_path):
    files = [parquet(tmp_path / "a.parquet", ROWS), jsonl(tmp_path / "b.jsonl", [{"prompt": "d", "x": 4}])]
    reader = RowReader(files, key="data.train_files")
    assert reader.columns == ["prompt", "n", "x"]
    assert reader[3] == {"prompt": "d", "n": None, "x": 4}
    assert reader.where(2) == f"{files[0]} row 2"
    assert reader.where(3) == f"{files[1]} line 1"
    with pytest.raises(UserError, match=r"b.jsonl: no column 'n' \(data.n_key\); it has prompt, x"):
        reader.require("n", "data.n_key")


def test_blank_lines_do_not_shift_line_numbers(tmp_path):
    reader = RowReader(jsonl(tmp_path / "x.jsonl", ROWS), key="data.train_files")
    assert reader.where(1).endswith("x.jsonl line 3")


@pytest.mark.parametrize("files", ["", [], None, [""], [3]])
def test_no_file_given(files):
    with pytest.raises(UserError, match=r"data.val_files is not set"):
        RowReader(files, key="data.val_files")


def test_files_that_cannot_be_used_are_named(tmp_path):
    def message(name, content=None):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            RowReader(str(tmp_path / name), key="data.train_files")
        text = str(caught.value)
        assert name in text and "\n" not in text
        return text

    assert "data.train_files" in message("missing.parquet") and "no such file" in message("missing.parquet")
    assert "'.csv' is not a kind of file" in message("x.csv", b"a,b\n")
    assert "cannot be read" in message("x.parquet", b"this is not parquet")
    assert "line 2: not JSON" in message("x.jsonl", b'{"a": 1}\n{"a": \n')
    assert "line 1: expected a JSON object, got list" in message("y.jsonl", b"[1, 2]\n")
    assert "cannot be read" in message("z.jsonl", b'{"a": "\xff"}\n')
    assert "no rows" in message("empty.jsonl", b"")
    (tmp_path / "folder").mkdir()
    assert "is a directory without parquet or JSON-lines files" in message("folder")
    assert "no file matches" in message("part-*.parquet")


def test_patterns_and_folders_are_read_in_order_of_their_names(tmp_path):
    for name, row in (("b-1", 1), ("b-0", 0), ("a", 2)):
        parquet(tmp_path / f"{name}.parquet", [ROWS[row]])
    (tmp_path / "notes.txt").write_text("not data")
    reader = RowReader([str(tmp_path / "b-*.parquet"), str(tmp_path)], key="data.train_files")
    assert [reader[i]["prompt"] for i in range(5)] == ["a", "b", "c", "a", "b"]
    assert [Path(file).name for file in reader.files] == [f"{n}.parquet" for n in ("b-0", "b-1", "a", "b-0", "b-1")]
    assert [reader.entry(i) for i in range(5)] == [0, 0, 1, 1, 1]
    assert reader.where(2) == f"{tmp_path / 'a.parquet'} row 0"


def test_what_save_to_disk_writes(tmp_path):
    import datasets

    saved = datasets.Dataset.from_list(ROWS * 2)
    saved.filter(lambda row: row["n"] > 1).save_to_disk(tmp_path / "one", num_shards=2)
    reader = RowReader(str(tmp_path / "one"), key="data.train_files")
    assert [reader[i] for i in range(len(reader))] == [row for row in ROWS * 2 if row["n"] > 1]
    assert len(reader.files) == 2 and reader.where(2).endswith("arrow row 0")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "many")
    with pytest.raises(UserError, match=r"has several splits \(test, train\): give one of them, such as .*/train"):
        RowReader(str(tmp_path / "many"), key="data.train_files")
    assert len(RowReader(str(tmp_path / "many" / "test"), key="data.train_files")) == 6
