"""A reasoning_gym task as prompts with answers; needs no network: pip install 'podium[reasoning-gym]'.

    python examples/data_preprocess/reasoning_gym_task.py --task chain_sum --out data/chain_sum \\
        --set min_terms=2 max_terms=2 min_digits=1 max_digits=1 --shots 2 --after ": "

With --shots the prompts are plain text that begins with worked examples, for models that follow no instructions;
otherwise they are chats. --after keeps only what follows this text in each question.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import task_row, write


def setting(text: str) -> tuple[str, Any]:
    """``key=value``, the value in JSON where it is."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def prompt_of(question: str, examples: list[tuple[str, str]]) -> Any:
    """A chat, or, where there are examples, a text that the answer continues."""
    if not examples:
        return [{"role": "user", "content": question}]
    return "".join(f"{asked} {answer}\n" for asked, answer in examples) + question


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="chain_sum")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train-size", type=int, default=1024)
    parser.add_argument("--val-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--after", default="")
    parser.add_argument(
        "--set", nargs="*", type=setting, default=[], metavar="KEY=VALUE", help="the task's own options"
    )
    args = parser.parse_args(argv)
    try:
        import reasoning_gym
    except ImportError:
        print("error: reasoning_gym is not installed: pip install 'podium[reasoning-gym]'", file=sys.stderr)
        return 2

    size = args.train_size + args.val_size + args.shots
    entries = reasoning_gym.create_dataset(args.task, size=size, seed=args.seed, **dict(args.set))
    pairs = [
        (entry["question"].split(args.after, 1)[-1] if args.after else entry["question"], entry["answer"])
        for entry in entries
    ]
    examples, rest = pairs[: args.shots], pairs[args.shots :]
    parts = {"train": rest[: args.train_size], "val": rest[args.train_size :]}
    for split, rows in parts.items():
        write(
            split,
            [{"question": question, "answer": answer} for question, answer in rows],
            lambda row, index, split=split: task_row(
                f"reasoning_gym/{args.task}",
                args.task,
                prompt_of(row["question"], examples),
                row["answer"],
                split,
                index,
            ),
            args.out,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
