"""Solve held-out prompts with an exported model, with plain transformers and nothing of Podium.

    python examples/quickstart/check_export.py EXPORT_DIR VAL_PARQUET --expect 0.98

Decodes greedily and prints the share of exact answers. With `--expect`, exits 1 when the share differs from it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything read here is a local folder

import pyarrow.parquet as pq
import torch
import transformers


def solve(model: Any, tokenizer: Any, prompts: list[str], batch_size: int, max_new_tokens: int) -> list[str]:
    """Greedy answers, decoded without special tokens, in the order of `prompts`."""
    answers: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(prompts[start : start + batch_size], padding=True, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=False,
                max_new_tokens=max_new_tokens,
            )
        answers += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("data", type=Path, help="a parquet file with the columns prompt and reward_model")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--expect", type=float, help="the share that validation reported")
    parser.add_argument("--tolerance", type=float, default=0.005, help="how far from --expect is still right")
    args = parser.parse_args(argv)
    for path in (args.model / "config.json", args.data):
        if not path.is_file():
            print(f"error: there is no file {path}", file=sys.stderr)
            return 2

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).eval()
    rows = pq.read_table(args.data, columns=["prompt", "reward_model"]).to_pylist()
    answers = solve(model, tokenizer, [row["prompt"] for row in rows], args.batch_size, args.max_new_tokens)
    right = sum(answer == row["reward_model"]["ground_truth"] for answer, row in zip(answers, rows, strict=True))
    rate = right / len(rows)
    print(f"plain transformers, greedy: {rate:.4f} ({right} of {len(rows)})")
    if args.expect is not None and abs(rate - args.expect) > args.tolerance:
        print(f"error: expected {args.expect:.4f} within {args.tolerance}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
