"""Verdicts to fine-tune a judge on, from preference pairs on the quickstart's task.

    python examples/judge/make_verdicts.py PAIRS --out FOLDER

PAIRS is what examples/rlhf/make_pairs.py wrote. The judge is shown a prompt with a response and the right answer,
"291417=112497:112479?", and says 1 (right) or 0. Writes train.parquet and val.parquet: prompt, response; as many right
ones as wrong ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; made if need be")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        rows = [
            {"prompt": f"{pair['prompt']}{pair[side]}:{pair['chosen']}?", "response": verdict}
            for pair in pq.read_table(args.pairs / f"{name}.parquet").to_pylist()
            for side, verdict in (("chosen", "1"), ("rejected", "0"))
        ]
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{name}.parquet")
        print(f"{name:<6} {len(rows)} verdicts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
