"""Rows of parquet, JSON-lines and Arrow files, with a name for every row that an error can point to."""

import glob
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
    """The rows of one or many files, in order, each as a dict, read on demand.

    `files` names parquet or JSON-lines files, patterns of such (``train-*.parquet``), folders of them, or folders that
    ``datasets.Dataset.save_to_disk`` wrote; what a pattern or a folder stands for is read in the order of its names.
    A column that only some files have is None in the others' rows.

    Attributes:
        files: every file read.
        entries: for each of them, which of the given names it comes from.

    Raises:
        UserError: no file, a file that is missing, unreadable, of another kind, or all of them empty. `key` is the
            configuration key that errors name.
    """

    def __init__(self, files: str | Sequence[str], *, key: str):
        names = [files] if isinstance(files, str) else list(files or [])
        if not names or not all(isinstance(file, str) and file for file in names):
            raise UserError(f"{key} is not set: give a parquet or JSON-lines file, or a list of them")
        found = [(file, entry) for entry, name in enumerate(names) for file in _expand(name, key)]
        self.files, self.entries = [file for file, _ in found], [entry for _, entry in found]
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

    def entry(self, row: int) -> int:
        """Which of the names that were given the row comes from."""
        return self.entries[self._locate(row)[0]]

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


class _TableRows:
    """Of a parquet file, or of an Arrow file as ``save_to_disk`` writes it."""

    def __init__(self, file: Path):
        if file.suffix == ".arrow":
            with pa.memory_map(str(file)) as stored:
                self._table = pa.ipc.open_stream(stored).read_all()
        else:
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


_READERS: dict[str, Callable[[Path], _TableRows | _JsonLinesRows]] = {
    ".parquet": _TableRows,
    ".arrow": _TableRows,
    ".jsonl": _JsonLinesRows,
    ".json": _JsonLinesRows,
}


def _expand(name: str, key: str) -> list[str]:
    """The files that a name stands for."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _files_of(path, name, key)
    if path.exists() or not glob.has_magic(name):
        return [name]
    matches = sorted(glob.glob(str(path), recursive=True))
    if not matches:
        raise UserError(f"{key}={name}: no file matches")
    return [file for match in matches for file in (_expand(match, key) if Path(match).is_dir() else [match])]


def _files_of(folder: Path, name: str, key: str) -> list[str]:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise UserError(
            f"{key}={name} has several splits ({', '.join(splits)}): give one of them, such as {name}/train"
        )
    if (folder / "state.json").exists():
        stored = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        return [str(folder / file["filename"]) for file in stored]
    files = sorted(str(file) for file in folder.iterdir() if file.suffix.lower() in (".parquet", ".jsonl"))
    if not files:
        raise UserError(f"{key}={name} is a directory without parquet or JSON-lines files (.parquet, .jsonl)")
    return files


def _read_file(name: str, key: str) -> _TableRows | _JsonLinesRows:
    file = Path(name).expanduser()
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
