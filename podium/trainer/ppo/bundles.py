"""The batch of a role's update in a file, from which ``podium replay`` makes the update again."""

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from podium.protocol import DataProto
from podium.utils.errors import UserError

RECORDED, BAD = "bundles", "bad_steps"
"""Folders of a run directory: of the steps that ``trainer.record_freq`` asks for, and of updates that were not made."""
ROLES = ("critic", "actor")
"""In the order in which a step of PPO updates them."""


@dataclass(frozen=True)
class Bundle:
    """What one call of an update was given."""

    step: int
    role: str
    batch: DataProto
    bad_updates: list[int]
    """Which of the call's optimizer steps were not made; empty where that was not known yet."""


def save_bundle(folder: Path, bundle: Bundle) -> Path | None:
    """Writes ``step_N_ROLE.safetensors`` to `folder`, whole or not at all.

    Returns:
        Where; None after a failure to write, which is said on stderr: a record is no reason to end a run.
    """
    assert bundle.batch.batch is not None
    path = folder / f"step_{bundle.step}_{bundle.role}.safetensors"
    about = {"step": bundle.step, "role": bundle.role, "bad_updates": bundle.bad_updates}
    tensors = {name: tensor.contiguous() for name, tensor in bundle.batch.batch.items()}
    unfinished = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, {name: json.dumps(value) for name, value in about.items()})
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        print(f"step {bundle.step}: the {bundle.role}'s batch was not kept in {path}: {error}", file=sys.stderr)
        return None
    return path


def load_bundle(path: Path) -> Bundle:
    """Reads a file of `save_bundle`.

    Raises:
        UserError: it is damaged, or another kind of file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Bundle(about["step"], about["role"], DataProto.from_dict(tensors), about["bad_updates"])
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is no batch that a run has kept, or is damaged: {error}") from error


def find_bundles(run_dir: Path, step: int) -> dict[str, Bundle]:
    """What a run has kept of a step, by role, in the order of the updates. Empty: nothing.

    Raises:
        UserError: a file is damaged.
    """
    found: dict[str, Bundle] = {}
    for role in ROLES:
        for folder in (RECORDED, BAD):  # the second knows which updates were bad
            path = run_dir / folder / f"step_{step}_{role}.safetensors"
            if path.is_file():
                found[role] = load_bundle(path)
    return found


def set_aside(run_dir: Path, after: int) -> None:
    """Moves what was kept of steps after `after`, which are computed anew, to ``previous`` in the same folder."""
    for folder in (run_dir / RECORDED, run_dir / BAD):
        for path in folder.glob("step_*.safetensors"):
            if int(path.name.split("_")[1]) > after:
                (folder / "previous").mkdir(exist_ok=True)
                path.replace(folder / "previous" / path.name)


def not_finite(batch: DataProto) -> list[str]:
    """Columns that a loss may read (log-probs, advantages, values) with NaN or infinity on a valid token, in words."""
    assert batch.batch is not None
    if "response_mask" not in batch.batch:  # preference pairs
        return []
    mask, said = batch.batch["response_mask"].bool(), []
    for name, tensor in batch.batch.items():
        if tensor.is_floating_point() and tensor.shape == mask.shape:
            where = torch.nonzero(mask & ~tensor.isfinite())
            if len(where):
                row, token = where[0].tolist()
                said.append(
                    f"{name} has {len(where)} values that are not finite, the first in row {row}, token {token}"
                )
    return said
