"""The supervised loop: one optimizer step a batch, on the same engine and roles as PPO."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.ppo.metrics import update_metrics
from podium.utils.dataset import EpochLoader
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
    ):
        self.config, self.group, self.tokenizer, self.tracking = config, group, tokenizer, tracking
        self.train_set, self.val_set, self.total_steps = train_set, val_set, total_steps
        data = config.data
        self.loader = EpochLoader(len(train_set), data.train_batch_size, data.seed, data.shuffle)
        self.timer = PhaseTimer()

    @abstractmethod
    def update(self, batch: DataProto) -> list[dict[str, float]]:
        """One optimizer step; its metrics."""

    @abstractmethod
    def validate(self, dataset: Any) -> dict[str, float]:
        """Metrics ``val/...`` of the model as it is."""

    def fit(self) -> dict[str, float]:
        """Trains to the last step and exports. Returns the last validation's metrics."""
        validation: dict[str, float] = {}
        for step in range(1, self.total_steps + 1):
            began = time.perf_counter()
            epoch, indices = next(self.loader)
            with self.timer("update"):
                updates = self.update(batch_of(self.train_set, indices))
            metrics = {**update_metrics("train", updates), "training/epoch": epoch, "training/global_step": step}
            validates = self.val_set is not None and self._is_due(step, self.config.trainer.test_freq)
            if validates:
                with self.timer("testing"):
                    validation = self.validate(self.val_set)
                metrics.update(validation)
            if validates or self._is_due(step, self.config.trainer.log_freq):
                times = {**self.timer.pop(), "timing_s/step": time.perf_counter() - began}
                self.tracking.log({**metrics, **times}, step=step)
        self.export()
        return validation

    def _is_due(self, step: int, frequency: int) -> bool:
        return step == self.total_steps or (frequency > 0 and step % frequency == 0)

    def export(self) -> None:
        """Writes the model and tokenizer as an ordinary Hugging Face directory, ``export`` in the run directory."""
        target = str((Path(self.config.trainer.default_local_dir) / "export").resolve())
        self.group.save_hf(target)
        self.tokenizer.save_pretrained(target)


def batch_of(dataset: Any, indices: Iterable[int]) -> DataProto:
    """Some rows of a data set as one batch."""
    return DataProto.from_dict(dataset.collate([dataset[int(i)] for i in indices]))
