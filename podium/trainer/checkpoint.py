"""A run's checkpoints: what is saved, when it counts, and which are kept."""

import contextlib
import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.protocol import WorkerDied, WorkerError, WorkerGroup
from podium.trainer.resume import Resume
from podium.utils.checkpoint import (
    BEST,
    DamagedCheckpointError,
    Files,
    beside,
    discard,
    mark,
    marked,
    prune,
    publish,
    read_manifest,
    require_space,
    step_folder,
    steps,
    write_manifest,
)
from podium.utils.random_state import random_state

# A little more than the tensors: their headers, random states, the manifest.
_OVERHEAD_BYTES = 2**20


class CheckpointError(RuntimeError):
    """The last checkpoint of a run could not be written."""


@dataclass
class _Pending:
    step: int
    folder: Path
    content: dict[str, Any]
    final: bool
    counts: bool = False
    """The step's metrics are on the disk."""


class Checkpoints:
    """Saves every trained role and the driver's state as ``global_step_N``; a crash leaves the previous one whole.

    A save has two parts. `begin` has the workers write beside (with ``async_save``: copy, and write while the run goes
    on); `commit` puts what is written in its place, and is called when the step's metrics are on the disk: a step that
    has a checkpoint has its line in metrics.jsonl. What ends the run between the two takes the save with it. A save
    that fails, for want of space, is reported and counted and the run goes on; only the last one of a run must succeed.

    Args:
        settings: has ``async_save``, ``max_ckpt_to_keep``, ``best_ckpt_metric``, ``best_ckpt_mode``.
        roles: trained roles by name; each writes a folder of that name.
        config: the run's configuration as plain values, without secrets; a resumed run is compared with it.
    """

    def __init__(self, run_dir: Path, settings: Any, roles: Mapping[str, WorkerGroup], config: Mapping[str, Any]):
        self._run_dir, self._settings = run_dir.resolve(), settings
        self._roles, self._config = dict(roles), config
        self._pending: _Pending | None = None
        self.failures = 0

    def begin(self, step: int, driver: Mapping[str, Any], *, final: bool = False) -> None:
        """Starts to save `step`, after the save before it, if that is still being written.

        Args:
            driver: state of the driver, as values that JSON holds.
            final: the run ends with it.

        Raises:
            CheckpointError: it failed, and is the last.
        """
        self._settle(wait=True)
        content = {
            "step": step,
            "driver": {**driver, "random": random_state()},
            "config": self._config,
        }
        try:
            folder = beside(step_folder(self._run_dir, step))
            sizes = [sum(group.checkpoint_bytes()) for group in self._roles.values()]
            require_space(folder, sum(sizes) + _OVERHEAD_BYTES)
            self._pending = _Pending(step, folder, content, final)
            for name, group in self._roles.items():
                group.save_checkpoint(str(folder / name), background=self._settings.async_save and not final)
        except (OSError, WorkerError) as error:
            self._failed(step, error, final)

    def load(self, resume: Resume) -> None:
        """Has the roles read a checkpoint. In its own run, it is the newest from here on, whatever came after it."""
        for name, group in self._roles.items():
            group.load_checkpoint(str(resume.folder / name))
        if resume.folder.parent == self._run_dir and marked(self._run_dir) != resume.step:
            mark(self._run_dir, resume.step)

    def state(self) -> str:
        """Which checkpoint a run would go on from now."""
        step = marked(self._run_dir)
        if step is None:
            return "no checkpoint is saved yet"
        return f"the run goes on from {step_folder(self._run_dir, step)}"

    def metrics(self) -> dict[str, float]:
        """``perf/checkpoint_failures``: saves that failed so far, where any did."""
        return {"perf/checkpoint_failures": self.failures} if self.failures else {}

    def close(self) -> None:
        """Ends a save that is under way, where the workers still can; one whose step was not logged is given up."""
        if self._pending is None:
            return
        with contextlib.suppress(WorkerError):  # they died of what ended the run, and that is being reported
            if self._pending.counts:
                self._settle(wait=True)
            else:
                self._give_up(self._pending.step)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def commit(self, metrics: Mapping[str, Any], *, wait: bool = False) -> None:
        """A step's metrics are on the disk: puts its save in its place, if it is written (or after it is, with `wait`).

        Args:
            metrics: of the step; the checkpoint's score is the one that ``best_ckpt_metric`` names.

        Raises:
            CheckpointError: it failed, and is the last.
        """
        if self._pending is not None and not self._pending.counts:
            self._pending.counts = True
            self._pending.content["score"] = self._score(metrics)
        self._settle(wait)

    def _score(self, metrics: Mapping[str, Any]) -> float | None:
        name = self._settings.best_ckpt_metric
        if name is None:
            return None
        if name not in metrics:
            near = difflib.get_close_matches(name, metrics, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            print(
                f"checkpoint  trainer.best_ckpt_metric={name} is no metric of this step: it cannot be the best{hint}",
                file=sys.stderr,
                flush=True,
            )
            return None
        score = float(metrics[name])
        return None if math.isnan(score) else score

    def _settle(self, wait: bool) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            files: Files = {}
            for group in self._roles.values():
                answers = group.saved_files(wait or pending.final)
                if None in answers:
                    return
                files.update(item for answer in answers for item in answer.items())
            self._pending = None
            write_manifest(pending.folder, files, pending.content)
            publish(pending.folder, step_folder(self._run_dir, pending.step))
            mark(self._run_dir, pending.step)
        except (OSError, WorkerError) as error:
            self._failed(pending.step, error, pending.final)
            return
        self._clean(pending.step)

    def _failed(self, step: int, error: Exception, final: bool) -> None:
        """Says what is left, and removes what was begun: on a full disk its space is what the next try needs."""
        if isinstance(error, WorkerDied):
            raise error
        self.failures += 1
        self._give_up(step)
        reason = str(error).partition("\n")[0]
        if final:
            raise CheckpointError(
                f"the last checkpoint (step {step}) was not saved: {reason}; {self.state()}"
            ) from error
        print(f"checkpoint  step {step} was not saved: {reason}; {self.state()}", file=sys.stderr, flush=True)

    def _give_up(self, step: int) -> None:
        """Removes what was written of a save, once nobody writes any more."""
        self._pending = None
        for group in self._roles.values():
            group.end_saving()
        discard(step_folder(self._run_dir, step))

    def _clean(self, step: int) -> None:
        """Deletes what is neither among the last to keep, nor the best."""
        limit = self._settings.max_ckpt_to_keep
        there = steps(self._run_dir)
        best = self._best(there)
        if best is not None:
            mark(self._run_dir, best, BEST)
        if limit is not None:
            # Later ones belong to a run that has been taken back; it may have been a mistake.
            newest, later = [other for other in there if other <= step][-limit:], [s for s in there if s > step]
            prune(self._run_dir, [*newest, *later, *([best] if best is not None else [])])

    def _best(self, there: list[int]) -> int | None:
        """The step with the best score, the later of equals."""
        if self._settings.best_ckpt_metric is None:
            return None
        sign = 1.0 if self._settings.best_ckpt_mode == "max" else -1.0
        scores = {step: _score(step_folder(self._run_dir, step)) for step in there}
        known = {step: sign * score for step, score in scores.items() if score is not None}
        return max(known, key=lambda step: (known[step], step), default=None)


def _score(folder: Path) -> float | None:
    try:
        return read_manifest(folder).get("score")
    except DamagedCheckpointError:  # resuming has named it; it is nobody's best
        return None
