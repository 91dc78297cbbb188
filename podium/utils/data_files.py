"""Rows of parquet and JSON-lines files, with a name for every row that an error can point to."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podium.utils.errors import UserError


class RowReader:
    """The rows of one or many parquet or JSON-lines files, in order, each as a dict, read on demand.

    A column that only some files have is None in the others' rows.

    Raises:
        UserError: no file, a file that is missing, unreadable, of another kind, or all of them empty. `key` is the
            configuration key that errors name.
    """

    def __init__(self, files: str | Sequence[str], *, key: str):
        self.files = [files] if isinstance(files, str) else list(files or [])
        if not self.files or not all(isinstance(file, str) and file for file in self.files):
            raise UserError(f"{key} is not set: give a parquet or JSON-lines file, or a list of them")
        self._parts = [_read_file(file, key) for file in self.files]
        self._starts = np.cumsum([0] + [len(part) for part in self._parts])
        self.columns = list(dict.fromkeys(name for part in self._parts for name in part.columns))
        if len(self) == 0:
            raise UserError(f"{key}={', '.join(self.files)}: no rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        part, local = self._locate(row)
        return {**dict.fromkeys(self.columns), **self._parts[part].row(local)}

    def column(self, name: str) -> Iterator[Any]:
        """The values of one column, row by row; None in files without it."""
        for part in self._parts:
            yield from part.column(name) if name in part.columns else itertools.repeat(None, len(part))

    def where(self, row: int) -> str:
        """What errors call a row: ``train.parquet row 3`` (counted from 0), ``train.jsonl line 4`` (from 1)."""
        part, local = self._locate(row)
        return f"{self.files[part]} {self._parts[part].place(local)}"

    def require(self, name: str, key: str) -> None:
        """Raises a `UserError` unless every file has column `name`; `key` is the configuration key that chose it."""
        for file, part in zip(self.files, self._parts, strict=True):
            if len(part) and name not in part.columns:
                raise UserError(f"{file}: no column '{name}' ({key}); it has {', '.join(part.columns) or 'none'}")

    def _locate(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return part, row - int(self._starts[part])


class _ParquetRows:
    def __init__(self, file: Path):
        self._table = pq.read_table(file, partitioning=None)
        self.columns = self._table.column_names

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]

    def column(self, name: str) -> Iterator[Any]:
        for chunk in self._table.column(name).chunks:
            yield from chunk.to_pylist()

    def place(self, index: int) -> str:
        return f"row {index}"


class _JsonLinesRows:
    def __init__(self, file: Path):
        self._rows: list[dict[str, Any]] = []
        self._lines: list[int] = []
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    self._rows.append(_json_object(line, f"{file} line {number}"))
                    self._lines.append(number)
        self.columns = list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for row in self._rows)

    def place(self, index: int) -> str:
        return f"line {self._lines[index]}"


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at character {error.pos}); one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}; one object a line")
    return row


_READERS: dict[str, Callable[[Path], _ParquetRows | _JsonLinesRows]] = {
    ".parquet": _ParquetRows,
    ".jsonl": _JsonLinesRows,
    ".json": _JsonLinesRows,
}


def _read_file(name: str, key: str) -> _ParquetRows | _JsonLinesRows:
    file = Path(name).expanduser()
    if file.is_dir():
        raise UserError(f"{key}={name} is a directory; give the parquet or JSON-lines files in it")
    if not file.exists():
        raise UserError(f"{key}={name}: there is no such file")
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise UserError(f"{key}={name}: '{file.suffix}' is not a kind of file read here; give .parquet or .jsonl")
    try:
        return reader(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{key}={name}: cannot be read ({reason})") from error
