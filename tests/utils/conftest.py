"""Rows as files, in each of the kinds that hold them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(params=["parquet", "jsonl"])
def write(request, tmp_path):
    def write_rows(rows, name="rows"):
        path = tmp_path / f"{name}.{request.param}"
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows
