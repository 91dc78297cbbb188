r"""MATH for PPO: the problem as a chat, what its solution boxes as ground truth.

    python examples/data_preprocess/math_dataset.py --out data/math [--source FOLDER_OR_HUB_NAME]

Problems whose solution boxes nothing are left out, and counted.
"""

from __future__ import annotations

import sys

from common import Row, arguments, load, task_row, write

INSTRUCTION = r"Reason step by step, and put the final answer within \boxed{}."
_MARKS = (r"\boxed{", r"\fbox{")


def last_boxed(solution: str) -> str | None:
    r"""What the last ``\boxed{...}`` holds, braces inside it included; None without one that closes."""
    start = max(solution.rfind(mark) + len(mark) if mark in solution else -1 for mark in _MARKS)
    if start < 0:
        return None
    depth = 1
    for position in range(start, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[position], 0)
        if depth == 0:
            return solution[start:position]
    return None


def row_of(row: Row, split: str, index: int) -> Row | None:
    """A row of the hub's data set in the columns that main_ppo reads."""
    truth = last_boxed(row["solution"])
    if truth is None:
        return None
    prompt = [{"role": "user", "content": f"{row['problem']} {INSTRUCTION}"}]
    return task_row("DigitalLearningGmbH/MATH-lighteval", "math", prompt, truth, split, index)


def main(argv: list[str] | None = None) -> int:
    args = arguments(__doc__, "DigitalLearningGmbH/MATH-lighteval").parse_args(argv)
    for split in ("train", "test"):
        rows = load(args.source, None, split, args.limit)
        write(split, rows, lambda row, index, split=split: row_of(row, split, index), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
