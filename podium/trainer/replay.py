"""``podium replay``: computes a step of a finished or broken run again, and compares every metric."""

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.trainer.config import PPOConfig
from podium.utils.errors import UserError

_CLOCK = ("timing_s/", "perf/")


def main(arguments: Sequence[str]) -> None:
    """Reads the command line and replays. Exit code 1: the step is another one."""
    parser = argparse.ArgumentParser(prog="podium replay", description=__doc__)
    parser.add_argument("run", type=Path, help="the run directory of a PPO run")
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative; on CPU nothing differs")
    options = parser.parse_args(arguments)
    different = replay(options.run, options.step, options.tolerance)
    for name, (before, now) in different.items():
        print(f"  {name}: {before} -> {now}")
    print(
        f"replay of step {options.step}: " + (f"{len(different)} metrics differ" if different else "every metric equal")
    )
    raise SystemExit(1 if different else 0)


def replay(run_dir: Path, step: int, tolerance: float = 0.0) -> dict[str, tuple[Any, Any]]:
    """Goes on from the newest checkpoint before `step`, in a directory of its own, up to that step.

    Returns:
        Metrics of the step that differ: as recorded, and as computed now.

    Raises:
        UserError: the step is not recorded, or there is no checkpoint before it.
    """
    from podium.trainer.export import typed
    from podium.trainer.main_ppo import train
    from podium.trainer.resume import read_checkpoint
    from podium.utils.checkpoint import step_folder, steps

    recorded = read_step(run_dir, step)
    before = [saved for saved in steps(run_dir) if saved < step]
    if not before:
        raise UserError(f"{run_dir} has no checkpoint before step {step}: steps are replayed from one")
    folder = step_folder(run_dir, before[-1])
    config = typed(read_checkpoint(folder).config)
    if not isinstance(config, PPOConfig):
        raise UserError(f"{run_dir}: only PPO runs are replayed")
    with tempfile.TemporaryDirectory(prefix="podium-replay-") as name:
        config.trainer = dataclasses.replace(
            config.trainer,
            default_local_dir=name,
            resume_mode="resume_path",
            resume_from_path=str(folder),
            logger=[],
        )
        train(config, last_step=step)
        now = read_step(Path(name), step)
    return {
        key: (recorded.get(key), now.get(key))
        for key in sorted(recorded.keys() | now.keys())
        if not key.startswith(_CLOCK) and not _equal(recorded.get(key), now.get(key), tolerance)
    }


def read_step(run_dir: Path, step: int) -> Mapping[str, Any]:
    """A step's line of metrics.jsonl.

    Raises:
        UserError: there is none.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} has no metrics.jsonl: it is no run directory")
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["step"] == step:
            return row
    raise UserError(f"{path} has no step {step}")


def _equal(left: Any, right: Any, tolerance: float) -> bool:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left == right or math.isclose(left, right, rel_tol=tolerance)
    return left == right
