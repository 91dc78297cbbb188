"""Which checkpoint a run goes on from, and whether it may."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.utils.checkpoint import DamagedCheckpointError, marked, recover, step_folder, step_of, steps, verify
from podium.utils.errors import UserError

# A step number, a row of the data or the shape of what is learnt would mean something else with another value.
_FIXED = (
    "algorithm.adv_estimator",
    "data.train_batch_size",
    "data.seed",
    "data.shuffle",
    "data.prompt_key",
    "data.train_weights",
    "data.sampler.path",
    "data.sampler.name",
    "actor_rollout_ref.actor.strategy",
    "strategy",
)
# What a run is called, where it runs and how it resumes are no part of what it computes.
_FREE = ("trainer.resume_", "trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
# Of the rest of its section, these alone decide what a run computes: the others say how it is run, watched and saved.
_COMPUTED = ("trainer.seed", "trainer.critic_warmup", "trainer.plugins")


@dataclass(frozen=True)
class Resume:
    """A whole checkpoint."""

    folder: Path
    step: int
    driver: Mapping[str, Any]
    config: Mapping[str, Any]


def resume_run(trainer: Any, config: Mapping[str, Any], fingerprint: str, total_steps: int) -> Resume | None:
    """What the run goes on from, after it has been said on the console; None for a new run.

    Where the checkpoint has all of `total_steps` there is nothing to do, and that is what is said.

    Args:
        trainer: has ``resume_mode``, ``resume_from_path``, ``default_local_dir``.
        config, fingerprint: as for `check_resume`.

    Raises:
        UserError: of `find_resume`, `check_resume` and `is_finished`.
    """
    resume = find_resume(trainer)
    if resume is None:
        return None
    changed = check_resume(resume, config, fingerprint)
    if getattr(trainer, "val_only", False):
        if resume.folder.parent == Path(trainer.default_local_dir).expanduser().resolve():
            raise UserError(
                f"trainer.val_only=true would write between the lines of the run in {trainer.default_local_dir}: to "
                "validate its checkpoint, set trainer.resume_mode=resume_path, "
                f"trainer.resume_from_path={resume.folder} and another trainer.default_local_dir"
            )
        print(f"resume  validating {resume.folder}", flush=True)
    elif is_finished(resume, changed, total_steps):
        print(f"nothing to do: {resume.folder} has all of the {total_steps} steps", flush=True)
    else:
        print(describe(resume, changed), flush=True)
    return resume


def find_resume(trainer: Any) -> Resume | None:
    """The checkpoint that ``resume_mode`` leads to, every file of it compared with its checksum; None for a new run.

    ``auto`` passes over damaged checkpoints to the newest whole one, and says so.

    Args:
        trainer: has ``resume_mode``, ``resume_from_path``, ``default_local_dir``.

    Raises:
        UserError: a run of the same directory in the way of a new one, no checkpoint where one is named, only damaged
            ones.
    """
    run_dir = Path(trainer.default_local_dir).expanduser()
    recover(run_dir)
    there = steps(run_dir)
    if trainer.resume_mode == "resume_path":
        path = trainer.resume_from_path
        resume = _read(_folder_of(Path(path).expanduser(), f"trainer.resume_from_path={path}"))
        if there and resume.folder.parent != run_dir.resolve():
            raise UserError(
                f"trainer.default_local_dir={run_dir} holds checkpoints of its own (up to global_step_{there[-1]}) "
                f"beside trainer.resume_from_path={trainer.resume_from_path}: choose another directory, or go on from "
                "those with trainer.resume_mode=auto"
            )
        return resume
    if trainer.resume_mode == "disable":
        if there:
            raise UserError(
                f"trainer.default_local_dir={run_dir} holds checkpoints of another run (up to "
                f"global_step_{there[-1]}), and trainer.resume_mode=disable starts a new one: choose another "
                "directory, or remove them"
            )
        return None
    return newest_whole(run_dir)


def newest_whole(run_dir: Path) -> Resume | None:
    """The newest checkpoint of a run that is as it was written; damaged ones are named on stderr. None: there is none.

    Raises:
        UserError: there are only damaged ones.
    """
    recover(run_dir)
    newest = marked(run_dir)
    # A later one than the marked was never finished, or belongs to a run that has been taken back.
    candidates = [step for step in reversed(steps(run_dir)) if newest is None or step <= newest]
    if newest is not None and newest not in candidates:
        print(f"resume  {step_folder(run_dir, newest)} is missing", file=sys.stderr)
    first: DamagedCheckpointError | None = None
    for step in candidates:
        try:
            return _read(step_folder(run_dir, step))
        except DamagedCheckpointError as error:
            print(f"resume  passing over a damaged checkpoint: {error}", file=sys.stderr)
            first = first or error
    if newest is not None or first is not None:
        raise UserError(
            f"trainer.default_local_dir={run_dir}: no whole checkpoint is left to go on from "
            f"({first or 'all are missing'}); choose another directory for a new run"
        )
    return None


def read_checkpoint(path: Path) -> Resume:
    """A checkpoint, or the newest of a run directory, every file of it compared with its checksum.

    Raises:
        UserError: there is none, or it is damaged.
    """
    return _read(_folder_of(path.expanduser(), str(path)))


def _folder_of(path: Path, name: str) -> Path:
    """A checkpoint, or the newest of a run directory."""
    if step_of(path) is not None:
        return path
    newest = marked(path)
    if newest is None:
        raise UserError(f"{name} is no checkpoint (global_step_N), and no run directory with one")
    return step_folder(path, newest)


def _read(folder: Path) -> Resume:
    manifest = verify(folder)
    # A checkpoint that was moved to another disk, with a link in its place, is still the run's.
    folder = folder.parent.resolve() / folder.name
    return Resume(folder, manifest["step"], manifest["driver"], manifest["config"])


def check_resume(resume: Resume, config: Mapping[str, Any], fingerprint: str) -> dict[str, tuple[Any, Any]]:
    """The keys that have changed since the checkpoint, with both values.

    Args:
        config: the run's configuration as plain values, without secrets, as `Checkpoints` was given it.
        fingerprint: of the training set, as the driver's state of the checkpoint has it under that name.

    Raises:
        UserError: one that must not, or other data.
    """
    before, now = _flat(resume.config), _flat(config)
    changed = {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(_FREE)
    }
    for key in _FIXED:
        if key in changed:
            raise UserError(
                f"cannot go on from {resume.folder}: {key} was {changed[key][0]} and is now {changed[key][1]}; "
                "set it back, or choose another trainer.default_local_dir for a new run"
            )
    if resume.driver["fingerprint"] != fingerprint:
        raise UserError(
            f"cannot go on from {resume.folder}: data.train_files has other rows than then (prompts, or what "
            "they are scored by: data_source, reward_model, extra_info), so the position in it would mean others; "
            "choose another trainer.default_local_dir for a new run"
        )
    return changed


def is_finished(resume: Resume, changed: Mapping[str, tuple[Any, Any]], total_steps: int) -> bool:
    """Whether there is nothing left to train.

    Raises:
        UserError: nothing is, but what is computed differs, so that another run must have been meant.
    """
    if resume.step < total_steps:
        return False
    other = {k: values for k, values in changed.items() if not k.startswith("trainer.") or k in _COMPUTED}
    if other:
        key, (before, now) = next(iter(other.items()))
        raise UserError(
            f"the run in {resume.folder.parent} is finished ({resume.step} steps of {total_steps}), and was another: "
            f"{key} was {before} and is now {now}; choose another trainer.default_local_dir for a new run"
        )
    return True


def metrics_from(resume: Resume | None, run_dir: Path) -> int | None:
    """The step up to which metrics.jsonl of `run_dir` belongs to the run; None where it is another's."""
    return resume.step if resume is not None and resume.folder.parent == run_dir else None


def describe(resume: Resume, changed: Mapping[str, tuple[Any, Any]]) -> str:
    """What the run goes on from, and what is not as it was, as lines for the console."""
    lines = [f"after step {resume.step}, from {resume.folder}"]
    lines += [f"changed: {key}: {before} -> {now}" for key, (before, now) in changed.items()]
    return "\n".join(f"resume  {line}" for line in lines)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
