"""The supervised loop: one optimizer step a batch, on the same engine and roles as PPO."""

import math
import time
from pathlib import Path
from typing import Any

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.config.sft import SFTConfig
from podium.trainer.ppo.metrics import update_metrics
from podium.utils.dataset import EpochLoader, SFTDataset, collate_sft
from podium.utils.timing import PhaseTimer
from podium.utils.torch_functional import masked_sum
from podium.utils.tracking import Tracking

_VALIDATION_ROWS = 256


class SFTTrainer:
    """Fits a causal language model to prompt-response pairs.

    Args:
        actor: an `ActorWorker` group with `sft_objective`.
        total_steps: optimizer steps to make.
    """

    def __init__(
        self,
        config: SFTConfig,
        actor: WorkerGroup,
        train_set: SFTDataset,
        val_set: SFTDataset | None,
        tokenizer: Any,
        tracking: Tracking,
        total_steps: int,
    ):
        self.config, self.actor, self.tokenizer, self.tracking = config, actor, tokenizer, tracking
        self.train_set, self.val_set, self.total_steps = train_set, val_set, total_steps
        data = config.data
        self.loader = EpochLoader(len(train_set), data.train_batch_size, data.seed, data.shuffle)
        self.timer = PhaseTimer()

    def fit(self) -> dict[str, float]:
        """Trains to the last step and exports. Returns the last validation's metrics."""
        validation: dict[str, float] = {}
        for step in range(1, self.total_steps + 1):
            began = time.perf_counter()
            epoch, indices = next(self.loader)
            with self.timer("update"):
                updates = self.actor.update_actor(self._batch(self.train_set, indices))[0]
            metrics = {**update_metrics("train", updates), "training/epoch": epoch, "training/global_step": step}
            validates = self.val_set is not None and self._is_due(step, self.config.trainer.test_freq)
            if self.val_set is not None and validates:
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

    def validate(self, dataset: SFTDataset) -> dict[str, float]:
        """Loss over a data set, and the mean probability of a whole response.

        The latter is the share of *sampled* responses that would equal the reference, token for token: what an RL run
        that starts here begins with.
        """
        loss, tokens, probability = 0.0, 0, 0.0
        for start in range(0, len(dataset), _VALIDATION_ROWS):
            batch = self._batch(dataset, range(start, min(start + _VALIDATION_ROWS, len(dataset))))
            assert batch.batch is not None
            mask = batch.batch["response_mask"]
            log_probs = self.actor.compute_log_prob(batch).batch["old_log_probs"]
            per_row = masked_sum(log_probs, mask, dim=-1)
            loss -= float(per_row.sum())
            tokens += int(mask.sum())
            probability += float(per_row.exp().sum())
        mean = loss / tokens
        return {
            "val/loss": mean,
            "val/perplexity": math.exp(min(mean, 700.0)),
            "val/response_prob": probability / len(dataset),
        }

    def export(self) -> None:
        """Writes the model and tokenizer as an ordinary Hugging Face directory, ``export`` in the run directory."""
        target = str((Path(self.config.trainer.default_local_dir) / "export").resolve())
        self.actor.save_hf(target)
        self.tokenizer.save_pretrained(target)

    def _batch(self, dataset: SFTDataset, indices: Any) -> DataProto:
        data = self.config.data
        rows = [dataset[int(i)] for i in indices]
        tensors = collate_sft(rows, self.tokenizer.pad_token_id, data.max_prompt_length, data.max_response_length)
        return DataProto.from_dict(tensors)
