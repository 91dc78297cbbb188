"""Mean reward of the first and the last five steps of a run, and what the exported model answers.

python examples/reasoning_gym/show.py RUN_DIR VAL_PARQUET
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything read here is a local folder

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    if len(sys.argv) != 3:
        print("error: give the run directory and a parquet file of prompts", file=sys.stderr)
        return 2
    run_dir = Path(sys.argv[1])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    print(f"mean reward, first 5 steps {sum(rewards[:5]) / 5:.3f}, last 5 steps {sum(rewards[-5:]) / 5:.3f}")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export").eval()
    for row in pq.read_table(sys.argv[2]).to_pylist()[:4]:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=4, do_sample=False)
        answer = str(tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True))
        question, truth = row["prompt"].splitlines()[-1], row["reward_model"]["ground_truth"]
        print(f"{question} {answer.strip().splitlines()[:1]} (right: {truth})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
