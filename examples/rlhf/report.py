"""What the pipeline came to: held-out accuracy of the reward model, and both scores before and after PPO.

    python examples/rlhf/report.py RUNS

Exits 1 unless the accuracy is above 0.9 and PPO has raised both the model's score and the true one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def metrics(run_dir: Path, key: str) -> list[float]:
    """The values of a metric in a run, in order."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def true_score(file: Path) -> float:
    """Mean of the scores that main_eval wrote."""
    scores = [score for row in pq.read_table(file, columns=["scores"]).to_pylist() for score in row["scores"]]
    return sum(scores) / len(scores)


def main() -> int:
    if len(sys.argv) != 2:
        print("error: give the folder of the pipeline's runs", file=sys.stderr)
        return 2
    runs = Path(sys.argv[1])
    accuracy = metrics(runs / "rm", "val/accuracy")[-1]
    model = metrics(runs / "ppo", "val/reward_model/score/mean")
    before, after = (true_score(runs / f"scored_{name}.parquet") for name in ("sft", "ppo"))
    print(f"reward model, held-out accuracy  {accuracy:.3f}")
    print(f"\n{'':33}before   after")
    print(f"reward model's score (greedy)    {model[0]:6.3f}  {model[-1]:6.3f}")
    print(f"true task score (sampled)        {before:6.3f}  {after:6.3f}")
    right = accuracy > 0.9 and model[-1] > model[0] and after > before
    print("ok" if right else "error: expected an accuracy above 0.9 and both scores to rise", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
