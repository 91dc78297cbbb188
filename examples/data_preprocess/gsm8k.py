"""GSM8K for PPO: the question as a chat, the final number as ground truth.

python examples/data_preprocess/gsm8k.py --out data/gsm8k [--source FOLDER_OR_HUB_NAME]
"""

from __future__ import annotations

import sys

from common import Row, arguments, load, task_row, write

INSTRUCTION = 'Reason step by step, and write the final answer after "####".'


def row_of(row: Row, split: str, index: int) -> Row:
    """A row of the hub's data set in the columns that main_ppo reads."""
    prompt = [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}]
    truth = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return task_row("openai/gsm8k", "math", prompt, truth, split, index)


def main(argv: list[str] | None = None) -> int:
    args = arguments(__doc__, "openai/gsm8k").parse_args(argv)
    for split in ("train", "test"):
        rows = load(args.source, "main", split, args.limit)
        write(split, rows, lambda row, index, split=split: row_of(row, split, index), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
