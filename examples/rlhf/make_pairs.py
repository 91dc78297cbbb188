"""Preference pairs on the quickstart's task, from what the fine-tuned model writes.

    python examples/rlhf/make_pairs.py SAMPLES.parquet --out FOLDER

SAMPLES is what main_generate wrote: prompts with several responses each. Who judges here knows the answer: the sorted
digits are preferred to a wrong response of the model. Near misses are turned down too: two digits swapped, or sorted
digits of which one is another. Without these the reward model learns "in ascending order", which is all that it takes
to tell this model's right responses from its wrong ones, and PPO finds out.

Writes train.parquet and val.parquet: prompt, chosen, rejected. No prompt is in both.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def near_miss(right: str, in_order: bool, rng: random.Random) -> str:
    """A wrong answer one edit away from the right one; `in_order`: it is sorted all the same, of other digits."""
    while True:
        digits = list(right)
        i, j, digit = rng.randrange(len(digits)), rng.randrange(len(digits)), rng.choice("0123456789")
        edit = rng.choice(("change", "lose", "add") if in_order else ("swap", "change"))
        if edit == "swap":
            digits[i], digits[j] = digits[j], digits[i]
        elif edit == "change":
            digits[i] = digit
        elif edit == "lose":
            del digits[i]
        else:
            digits.insert(i, digit)
        answer = "".join(sorted(digits) if in_order else digits)
        if answer != right:
            return answer


def pairs_of(row: dict[str, Any], rng: random.Random) -> list[dict[str, str]]:
    """The right answer against each different wrong response to a prompt, and against three near misses."""
    right = row["reward_model"]["ground_truth"]
    wrong = sorted(set(row["responses"]) - {right})
    misses = [near_miss(right, in_order, rng) for in_order in (False, True, True)]
    return [{"prompt": row["prompt"], "chosen": right, "rejected": text} for text in (*wrong, *misses)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; made if need be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--val-prompts", type=int, default=256)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    rows = pq.read_table(args.samples).to_pylist()
    if len(rows) <= args.val_prompts:
        print(f"error: {args.samples} has {len(rows)} prompts, no more than --val-prompts", file=sys.stderr)
        return 2
    rng.shuffle(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("val", rows[: args.val_prompts]), ("train", rows[args.val_prompts :])):
        pairs = [pair for row in part for pair in pairs_of(row, rng)]
        pq.write_table(pa.Table.from_pylist(pairs), args.out / f"{name}.parquet")
        print(f"{name:<6} {len(pairs)} pairs of {len(part)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
