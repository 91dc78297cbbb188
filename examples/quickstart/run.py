"""The quickstart: make a task and a model, warm the model up, train it with PPO, and show before and after.

    python examples/quickstart/run.py [--algorithm ppo|grpo] [--seed N] [key=value ...]

Further key=value arguments go to the PPO run, for example ``actor_rollout_ref.rollout.name=hf``. Everything is written
to runs/quickstart-DATE; the task is made anew from the seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ROLLOUT = "actor_rollout_ref.rollout.name="
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "weight_sync")


def run(title: str, command: list[str], env: dict[str, str]) -> None:
    """Runs one stage; a failure ends the quickstart with the stage's exit code."""
    print(f"\n== {title}", flush=True)
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if code:
        print(f"error: '{' '.join(command[:2])} ...' ended with exit code {code}", file=sys.stderr)
        raise SystemExit(code)


def summarize(run_dir: Path) -> float:
    """Prints the curve, the time by phase, and before and after. Returns the last greedy validation."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "critic/score/mean" in row]
    validations = [(row["step"], row["val/score/mean"]) for row in rows if "val/score/mean" in row]
    rewards = [row["critic/score/mean"] for row in steps]
    every = max(1, len(rewards) // 15)
    print("\nsampled reward by step:", " ".join(f"{r:.2f}" for r in rewards[::every]))
    print("seconds a step by phase:", "  ".join(f"{p} {mean(steps, f'timing_s/{p}'):.3f}" for p in PHASES))
    worst = {name: max(row.get(name, 0.0) for row in steps) for name in CHECKS}
    print("worst of all steps:", "  ".join(f"{label} {worst[name]:.1e}" for name, label in CHECKS.items()))
    edge = max(1, min(5, len(rewards) // 2))
    first, last = sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge
    print(f"\n{'':24}before   after")
    print(f"sampled reward (train)  {first:6.3f}  {last:6.3f}")
    print(f"greedy, held-out        {validations[0][1]:6.3f}  {validations[-1][1]:6.3f}")
    return validations[-1][1]


CHECKS = {
    "training/first_ratio_dev_max": "|ratio - 1| on the first mini-batch",
    "training/rollout_log_probs_diff_mean": "mean train/rollout log-prob gap",
}


def mean(rows: list[dict[str, Any]], key: str) -> float:
    """Mean of a metric over all steps; a step without it counts as 0."""
    return sum(row.get(key, 0.0) for row in rows) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the model, the warm start and the run")
    args, overrides = parser.parse_known_args()
    bad = [text for text in overrides if "=" not in text or text.startswith("--")]
    if bad:
        parser.error(f"{bad[0]}: expected key=value")
    if any(text.startswith("trainer.default_local_dir=") for text in overrides):
        parser.error("trainer.default_local_dir: the quickstart writes to runs/quickstart-DATE")
    if importlib.util.find_spec("vllm") is None and not any(text.startswith(ROLLOUT) for text in overrides):
        print("vllm is not installed: generating with plain transformers (rollout.name=hf)")
        overrides.append(ROLLOUT + "hf")
    began = time.perf_counter()
    out = ROOT / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    env = {**os.environ, "PYTHON": sys.executable, "TASK": str(out / "task"), "RUNS": str(out)}
    task = [sys.executable, str(HERE / "make_task.py"), "--out", str(out / "task"), "--seed", str(args.seed)]
    run("the task: sort six digits, 291417= -> 112479", task, env)
    order = f"data.seed={args.seed + 1}"
    run("warm start: SFT on answers of which three in eight are right", [str(HERE / "sft.sh"), order], env)
    script = ROOT / "examples" / args.algorithm / f"run_{args.algorithm}_cpu.sh"
    run(args.algorithm.upper(), [str(script), order, f"trainer.seed={args.seed}", *overrides], env)
    run_dir = out / args.algorithm
    rate = summarize(run_dir)
    check = [sys.executable, str(HERE / "check_export.py"), str(run_dir / "export"), str(out / "task" / "val.parquet")]
    run("the exported model under plain transformers", [*check, "--expect", str(rate)], env)
    print(f"\nrun directory: {run_dir.relative_to(ROOT)} (metrics.jsonl, checkpoints, export)")
    print(f"total time: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
