"""What the preprocessing scripts share: rows from the hub or a local copy, and parquet out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def arguments(doc: str | None, dataset: str) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; made if need be")
    parser.add_argument("--source", default=dataset, help="hub name, or a local copy of the data set (a folder)")
    parser.add_argument("--limit", type=int, help="only the first rows of each split")
    return parser


def load(source: str, config: str | None, split: str, limit: int | None) -> Iterable[Row]:
    """One split of a data set.

    A local copy is what ``save_to_disk`` wrote, or a folder as the hub has it.
    """
    try:
        import datasets
    except ImportError:
        raise SystemExit("error: this needs the package datasets: pip install 'podium[data]'") from None
    folder = Path(source).expanduser()
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = datasets.load_from_disk(str(folder))
        rows = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
    else:
        rows = datasets.load_dataset(str(folder) if folder.is_dir() else source, config, split=split)
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def write(name: str, rows: Iterable[Row], make: Callable[[Row, int], Row | None], out: Path) -> None:
    """Writes ``OUT/NAME.parquet`` with `make` of every row; rows of which it makes None are left out and counted."""
    made = [make(dict(row), index) for index, row in enumerate(rows)]
    kept = [row for row in made if row is not None]
    if not kept:
        raise SystemExit(f"error: no row of {name} can be used")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(kept), path)
    print(f"{path}: {len(kept)} rows" + (f", {len(made) - len(kept)} left out" if len(kept) < len(made) else ""))


def task_row(source: str, ability: str, prompt: Any, truth: str, split: str, index: int) -> Row:
    """A prompt with its answer, in the columns that main_ppo reads."""
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }
