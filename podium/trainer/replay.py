"""``podium replay``: computes a step of a finished or broken run again, and compares every metric."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.trainer.config_history import config_at
from podium.utils.errors import UserError

if TYPE_CHECKING:
    from podium.trainer.config import PPOConfig
    from podium.trainer.ppo.bundles import Bundle
    from podium.trainer.ppo.trainer import PPOTrainer

_CLOCK = ("timing_s/", "perf/")


def main(arguments: Sequence[str]) -> None:
    """Reads the command line and replays. Exit code 1: the step is another one."""
    parser = argparse.ArgumentParser(prog="podium replay", description=__doc__)
    parser.add_argument("run", type=Path, help="the run directory of a PPO run")
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative; on CPU nothing differs")
    parser.add_argument(
        "--secret", action="append", default=[], metavar="KEY=VALUE", help="a secret that the run did not write down"
    )
    options = parser.parse_args(arguments)
    recorded, now = replay(options.run, options.step, options.secret)
    if recorded is None:
        print(f"replay of step {options.step}: the run ended in it, so there is nothing to compare with")
        print("\n".join(f"  {name}: {value}" for name, value in now.items()))
        return
    different = differences(recorded, now, options.tolerance)
    for name, (before, after) in different.items():
        print(f"  {name}: {before} -> {after}")
    result = f"{len(different)} metrics differ" if different else f"every metric equal ({len(now)})"
    print(f"replay of step {options.step}: {result}")
    raise SystemExit(1 if different else 0)


def replay(run_dir: Path, step: int, secrets: Sequence[str] = ()) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """Computes a step again, in a directory of its own, from the newest checkpoint before it, or from the start.

    Where the run has kept the batches of the step's updates, only those are made again, on the same batches; else the
    step with everything in it.

    Args:
        secrets: ``key=value`` of what the run was given and did not write down.

    Returns:
        The step's metrics, as recorded (None: the run ended in it) and as computed now: no times, no memory; of
        updates alone, theirs.

    Raises:
        UserError: the step is not recorded, or a secret is missing.
    """
    from podium.trainer.main_ppo import train
    from podium.trainer.ppo.bundles import find_bundles
    from podium.utils.tracking import as_json

    bundles = find_bundles(run_dir, step)
    recorded = read_step(run_dir, step)
    if recorded is None and not bundles:
        raise UserError(f"{run_dir / 'metrics.jsonl'} has no step {step}")
    config = _configured(run_dir, step, secrets, is_alone=bool(bundles))
    with tempfile.TemporaryDirectory(prefix="podium-replay-") as name:
        config.trainer = dataclasses.replace(config.trainer, default_local_dir=name)
        if bundles:
            _tell(bundles)
            now: dict[str, Any] = {}
            batches = {role: bundle.batch for role, bundle in bundles.items()}

            def rerun(loop: PPOTrainer) -> None:
                now.update(loop.rerun(batches))

            train(config, last_step=step - 1, after=rerun)
        else:
            train(config, last_step=step)
            now = dict(read_step(Path(name), step) or {})
    now = {key: as_json(value) for key, value in now.items()}
    if recorded is not None and bundles:
        recorded = {key: value for key, value in recorded.items() if key in now}
    return (None if recorded is None else _timeless(recorded)), _timeless(now)


def differences(
    recorded: Mapping[str, Any], now: Mapping[str, Any], tolerance: float = 0.0
) -> dict[str, tuple[Any, Any]]:
    """Metrics that differ: as recorded, and as computed now.

    Args:
        tolerance: relative.
    """
    return {
        key: (recorded.get(key), now.get(key))
        for key in sorted(recorded.keys() | now.keys())
        if not _equal(recorded.get(key), now.get(key), tolerance)
    }


def read_step(run_dir: Path, step: int) -> Mapping[str, Any] | None:
    """A step's line of metrics.jsonl; None where there is none.

    Raises:
        UserError: there is no such file.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} has no metrics.jsonl: it is no run directory")
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["step"] == step:
            return row
    return None


def _configured(run_dir: Path, step: int, secrets: Sequence[str], is_alone: bool) -> PPOConfig:
    """The run's configuration, which goes on from the newest checkpoint before `step`, or starts."""
    from podium.trainer.export import typed
    from podium.utils.checkpoint import step_folder, steps

    plain, since = config_at(run_dir, step)
    config = typed(_with_secrets(plain, secrets))
    before = [saved for saved in steps(run_dir) if saved < step]
    folder = step_folder(run_dir, before[-1]) if before else None
    if (before[-1] if before else 0) < since:
        print(
            f"the configuration was another up to step {since}, and no later checkpoint is left: what comes may differ"
        )
    if folder is not None:
        config.trainer = dataclasses.replace(config.trainer, resume_mode="resume_path", resume_from_path=str(folder))
    elif config.trainer.resume_mode != "resume_path":  # of another run's checkpoint, which this one began with
        print(f"{run_dir} has no checkpoint before step {step}: every step up to it is computed", flush=True)
        config.trainer = dataclasses.replace(config.trainer, resume_mode="disable")
    config.trainer = dataclasses.replace(
        config.trainer,
        logger=[],
        record_freq=-1,
        max_bad_steps=sys.maxsize,  # the step that ended the run is to come again
        val_before_train=config.trainer.val_before_train and not is_alone,
    )
    return config


def _with_secrets(plain: Mapping[str, Any], secrets: Sequence[str]) -> Mapping[str, Any]:
    from omegaconf import OmegaConf

    from podium.utils.redact import REDACTED, require_secrets

    config = OmegaConf.create(dict(plain))
    for given in secrets:
        key, _, value = given.partition("=")
        if REDACTED not in str(OmegaConf.select(config, key)):
            raise UserError(f"--secret {key}: the run has no secret there that it did not write down")
        OmegaConf.update(config, key, value)
    plain = typing.cast(dict[str, Any], OmegaConf.to_container(config))
    require_secrets(plain, "--secret ")
    return plain


def _tell(bundles: Mapping[str, Bundle]) -> None:
    """Says what is computed again, and what is wrong with it as far as that can be seen."""
    from podium.trainer.ppo.bundles import not_finite

    for role, bundle in bundles.items():
        print(f"replay of the update of the {role} on its batch of step {bundle.step}: {len(bundle.batch)} rows")
        if bundle.bad_updates:
            print(f"  optimizer steps that were not made (from 0): {', '.join(map(str, bundle.bad_updates))}")
        for what in not_finite(bundle.batch):
            print(f"  {what}")


def _timeless(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(_CLOCK)}


def _equal(left: Any, right: Any, tolerance: float) -> bool:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left == right or math.isclose(left, right, rel_tol=tolerance)
    return left == right
