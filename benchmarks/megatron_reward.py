"""PPO on the quickstart's task with FSDP and with Megatron, split by tensors and by layers: the reward of each step.

    python benchmarks/megatron_reward.py [--out runs/megatron_reward] [--only fsdp|tp2|pp2] [key=value ...]

Every run has two Ray workers, each with a vLLM engine, and all its roles on the engine named; otherwise it is
examples/ppo/run_ppo_cpu.sh, which further key=value arguments override. They start from one model, with one seed.
What is in --out already is not made again: the runs may be taken one at a time, and the table printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEGATRON = ["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"]
RUNS = {
    "fsdp": ("FSDP", []),
    "tp2": ("Megatron tp=2", [*MEGATRON, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]),
    "pp2": ("Megatron pp=2", [*MEGATRON, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"]),
}
"""Title and configuration of each run."""
REWARD, GREEDY = "critic/score/mean", "val/score/mean"
CHECKS = {
    "training/first_ratio_dev_max": "ratio on a first mini-batch, farthest from 1 by",
    "training/rollout_log_probs_diff_mean": "log-prob gap of trainer and rollout, largest mean",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "megatron_reward")
    parser.add_argument("--only", choices=list(RUNS), help="the run to make now; all, if not given")
    args, overrides = parser.parse_known_args()
    if bad := [text for text in overrides if "=" not in text or text.startswith("--")]:
        parser.error(f"{bad[0]}: expected key=value")
    out = args.out.resolve()
    env = os.environ | {"PYTHON": sys.executable, "TASK": str(out / "task"), "RUNS": str(out)}
    for name in [args.only] if args.only else RUNS:
        if not is_finished(out / name):
            script = ROOT / "examples" / "ppo" / "run_ppo_cpu.sh"
            keys = [*RUNS[name][1], "trainer.n_gpus_per_node=2", f"trainer.default_local_dir={out / name}", *overrides]
            subprocess.run([str(script), *keys], cwd=ROOT, env=env, check=True)
    if done := [name for name in RUNS if is_finished(out / name)]:
        print(table({name: rows_of(out / name) for name in done}))


def is_finished(run_dir: Path) -> bool:
    """Whether the run has come to its end, where it exports the model."""
    return (run_dir / "export" / "config.json").is_file()


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each step, and of the validation before them."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def table(runs: dict[str, list[dict[str, float]]], lines: int = 15) -> str:
    """Markdown: the sampled reward at about so many steps, the last among them, greedy validation, and the checks."""
    steps = {name: [row for row in rows if REWARD in row] for name, rows in runs.items()}
    greedy = {name: [row[GREEDY] for row in rows if GREEDY in row] for name, rows in runs.items()}
    last = min(len(rows) for rows in steps.values())
    shown = sorted({1, *range(last, 0, -max(1, last // lines))})
    edge = min(5, last)
    entries = [(f"{step}", {name: rows[step - 1][REWARD] for name, rows in steps.items()}) for step in shown]
    entries.append(
        (f"mean of the last {edge}", {n: sum(row[REWARD] for row in r[-edge:]) / edge for n, r in steps.items()})
    )
    entries.append(("greedy, held-out, before", {name: values[0] for name, values in greedy.items()}))
    entries.append(("greedy, held-out, after", {name: values[-1] for name, values in greedy.items()}))
    head = ["| Reward at step | " + " | ".join(RUNS[name][0] for name in runs) + " |", "|---" * (len(runs) + 1) + "|"]
    body = [f"| {label} | " + " | ".join(f"{values[name]:.3f}" for name in runs) + " |" for label, values in entries]
    checks = [
        f"| {label} | " + " | ".join(f"{max(row.get(key, 0.0) for row in steps[name]):.1e}" for name in runs) + " |"
        for key, label in CHECKS.items()
    ]
    seconds = [f"{sum(row['timing_s/step'] for row in rows) / len(rows):.1f}" for rows in steps.values()]
    return "\n".join([*head, *body, *checks, "| seconds a step | " + " | ".join(seconds) + " |"])


if __name__ == "__main__":
    main()
