"""Responses on disk while a run makes them: finished batches, so that a killed run goes on where it was."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from podium.utils.errors import UserError

_PLAN = "plan.json"
_KEY = b"podium.plan"


class Parts:
    """A folder beside the output, with one file a finished batch and the plan that all of them follow.

    A file is written under another name and renamed, so one that is there is whole. The output takes the folder's place
    in the same way, with the plan in its metadata.

    Args:
        output: the parquet file to write in the end.
        plan: what the responses depend on, JSON-able; a run with another plan does not go on.
    """

    def __init__(self, output: Path, plan: dict[str, Any]):
        self._output, self._plan = output, json.dumps(plan, sort_keys=True)
        self._folder = output.with_name(output.name + ".parts")

    def open(self) -> bool:
        """Begins, or goes on. Returns whether the output is complete already.

        Raises:
            UserError: what is there was made by another plan.
        """
        if self._output.exists():
            made_by = (pq.read_schema(self._output).metadata or {}).get(_KEY, b"").decode()
            self._require_same(made_by, self._output)
            return True
        plan = self._folder / _PLAN
        if plan.exists():
            self._require_same(plan.read_text(encoding="utf-8"), self._folder)
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        _replace(plan, lambda file: file.write_text(self._plan, encoding="utf-8"))
        return False

    def _require_same(self, made_by: str, where: Path) -> None:
        if made_by == self._plan:
            return
        mine, theirs = json.loads(self._plan), json.loads(made_by or "{}")
        different = [name for name in mine if mine[name] != theirs.get(name)]
        raise UserError(
            f"data.output_path={self._output}: {where} was made with another {', '.join(different)}; delete it, or "
            "write elsewhere"
        )

    def has(self, start: int) -> bool:
        """Whether the batch that starts at this row is finished."""
        return self._file(start).exists()

    def write(self, start: int, columns: dict[str, list[Any]]) -> None:
        """Keeps a finished batch."""
        _replace(self._file(start), lambda file: pq.write_table(pa.table(columns), file))

    def read(self) -> Iterator[dict[str, Any]]:
        """All rows, in order."""
        for file in sorted(self._folder.glob("*.parquet")):
            yield from pq.read_table(file).to_pylist()

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """Writes the output and removes the folder.

        Raises:
            UserError: rows of one column that do not fit one type.
        """
        try:
            table = pa.Table.from_pylist(rows)
        except pa.ArrowException as error:
            raise UserError(
                f"data.output_path={self._output}: the input's columns do not fit parquet ({error})"
            ) from error
        table = table.replace_schema_metadata({_KEY: self._plan.encode()})
        _replace(self._output, lambda file: pq.write_table(table, file))
        shutil.rmtree(self._folder)

    def _file(self, start: int) -> Path:
        return self._folder / f"{start:012d}.parquet"


def _replace(path: Path, write: Any) -> None:
    """Writes beside `path`, and renames only what is whole and on the disk."""
    beside = path.with_name(path.name + ".tmp")
    write(beside)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)
