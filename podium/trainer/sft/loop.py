"""The supervised loop: one optimizer step a batch, on the same engine and roles as PPO."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.checkpoint import Checkpoints
from podium.trainer.ppo.bad_steps import EMPTY, SKIPPED, BadSteps
from podium.trainer.ppo.metrics import update_metrics
from podium.trainer.preemption import Preempted, Preemption
from podium.trainer.resume import Resume
from podium.utils.checkpoint import beside, publish
from podium.utils.dataset import EpochLoader
from podium.utils.random_state import set_random_state
from podium.utils.timing import PhaseTimer
from podium.utils.tracking import Tracking


class SupervisedTrainer(ABC):
    """Trains on batches of rows; what an update is and how the model is judged is up to the subclass.

    Args:
        config: has ``data`` and ``trainer``.
        group: the role that is trained.
        train_set, val_set: have a length, rows by index, and ``collate``, which makes tensors of rows.
        total_steps: optimizer steps to make.
    """

    def __init__(
        self,
        config: Any,
        group: WorkerGroup,
        train_set: Any,
        val_set: Any | None,
        tokenizer: Any,
        tracking: Tracking,
        total_steps: int,
        checkpoints: Checkpoints,
        preemption: Preemption,
    ):
        self.config, self.group, self.tokenizer, self.tracking = config, group, tokenizer, tracking
        self.train_set, self.val_set, self.total_steps = train_set, val_set, total_steps
        data = config.data
        self.loader = EpochLoader(len(train_set), data.train_batch_size, data.seed, data.shuffle)
        self.timer = PhaseTimer()
        self.checkpoints, self.preemption = checkpoints, preemption
        self.bad_steps = BadSteps(Path(config.trainer.default_local_dir), config.trainer.max_bad_steps)
        self.step = 0

    @abstractmethod
    def update(self, batch: DataProto) -> list[dict[str, float]]:
        """One optimizer step; its metrics."""

    @abstractmethod
    def validate(self, dataset: Any) -> dict[str, float]:
        """Metrics ``val/...`` of the model as it is."""

    def fit(self) -> dict[str, float]:
        """Trains to the last step and exports. Returns the last validation's metrics.

        Raises:
            Preempted: after SIGTERM.
        """
        validation: dict[str, float] = {}
        for step in range(self.step + 1, self.total_steps + 1):
            self.step, began = step, time.perf_counter()
            epoch, indices = next(self.loader)
            batch = batch_of(self.train_set, indices)
            with self.timer("update"):
                updates = self.update(batch)
            bad = self.bad_steps.note("train", step, batch, updates)
            updates = [update for update in updates if SKIPPED not in update and EMPTY not in update]
            metrics = {**update_metrics("train", updates), **bad, "training/epoch": epoch, "training/global_step": step}
            validates = self.val_set is not None and self._is_due(step, self.config.trainer.test_freq)
            if validates:
                with self.timer("testing"):
                    validation = self.validate(self.val_set)
                metrics.update(validation)
            if self._is_due(step, self.config.trainer.save_freq):
                self.save()
            if validates or self._is_due(step, self.config.trainer.log_freq):
                times = {**self.timer.pop(), "timing_s/step": time.perf_counter() - began}
                self.tracking.log({**metrics, **self.checkpoints.metrics(), **times}, step=step)
            self.checkpoints.commit(metrics)
            self.stop_if_asked(metrics)
        return validation

    def save(self) -> None:
        """Begins a checkpoint of this step; at the last, a Hugging Face export comes with it."""
        driver = {
            "loader": self.loader.state_dict(),
            "fingerprint": self.train_set.fingerprint(),
            "bad_steps_in_a_row": self.bad_steps.in_a_row,
        }
        final = self.step == self.total_steps
        with self.timer("save_checkpoint"):
            self.checkpoints.begin(self.step, driver, final=final)
            if final:
                self.export()

    def restore(self, resume: Resume) -> None:
        """Puts everything where it was after the checkpoint's step."""
        self.checkpoints.load(resume)
        self.step = resume.step
        self.loader.load_state_dict(resume.driver["loader"])
        self.bad_steps.in_a_row = dict(resume.driver["bad_steps_in_a_row"])
        set_random_state(resume.driver["random"])

    def stop_if_asked(self, metrics: dict[str, Any]) -> None:
        """After SIGTERM: saves this step, if it is not saved yet, and ends the run."""
        if not self.preemption.asked or self.step == self.total_steps:
            return
        if not self._is_due(self.step, self.config.trainer.save_freq):
            self.save()
        self.checkpoints.commit(metrics, wait=True)
        raise Preempted(f"stopped by SIGTERM after step {self.step}; {self.checkpoints.state()}")

    def _is_due(self, step: int, frequency: int) -> bool:
        return step == self.total_steps or (frequency > 0 and step % frequency == 0)

    def export(self) -> None:
        """Writes the model and tokenizer as an ordinary Hugging Face directory, ``export`` in the run directory."""
        target = (Path(self.config.trainer.default_local_dir) / "export").resolve()
        written = beside(target)
        self.group.save_hf(str(written))
        self.tokenizer.save_pretrained(written)
        publish(written, target)


def batch_of(dataset: Any, indices: Iterable[int]) -> DataProto:
    """Some rows of a data set as one batch."""
    return DataProto.from_dict(dataset.collate([dataset[int(i)] for i in indices]))
