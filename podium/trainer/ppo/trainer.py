"""The PPO loop, for every algorithm and every schedule."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.checkpoint import Checkpoints
from podium.trainer.config.ppo import PPOConfig
from podium.trainer.ppo.bad_steps import EMPTY, SKIPPED, BadSteps
from podium.trainer.ppo.bundles import RECORDED, Bundle, not_finite, save_bundle
from podium.trainer.ppo.estimator import Estimator
from podium.trainer.ppo.invariants import Invariants
from podium.trainer.ppo.kl import apply_kl_penalty, get_kl_controller
from podium.trainer.ppo.metrics import (
    batch_metrics,
    forward_metrics,
    memory_metrics,
    throughput_metrics,
    update_metrics,
)
from podium.trainer.ppo.plan import Plan
from podium.trainer.ppo.rollout_client import RolloutClient
from podium.trainer.ppo.rollout_correction import compute_rollout_correction
from podium.trainer.ppo.sampling import pf_ppo_resample
from podium.trainer.ppo.scoring import advantages_of_scored, scored_rows
from podium.trainer.ppo.source import RolloutSource
from podium.trainer.ppo.validation import Validator
from podium.trainer.preemption import Preempted, Preemption
from podium.trainer.resume import Resume
from podium.trainer.weight_sync import WeightSync
from podium.utils.checkpoint import beside, publish
from podium.utils.random_state import set_random_state
from podium.utils.timing import PhaseTimer
from podium.utils.tracking import Tracking

FORWARD_COLUMNS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


class PPOTrainer:
    """Runs the algorithm over worker groups; holds no tensor longer than a step.

    Args:
        groups: ``actor`` and ``rollout``, and ``critic`` and ``ref`` where the plan has them.
        rollout: through which the rollout is called.
        fingerprint: of the training set; a checkpoint keeps it.
    """

    def __init__(
        self,
        config: PPOConfig,
        plan: Plan,
        groups: dict[str, WorkerGroup],
        rollout: RolloutClient,
        source: RolloutSource,
        validator: Validator | None,
        tokenizer: Any,
        tracking: Tracking,
        timer: PhaseTimer,
        checkpoints: Checkpoints,
        preemption: Preemption,
        fingerprint: str = "",
    ):
        self.config, self.plan = config, plan
        self.groups = groups
        self.actor, self.rollout = groups["actor"], rollout
        rollout.refeed = self.refeed
        self.critic, self.ref = groups.get("critic"), groups.get("ref")
        if plan.use_reference and plan.reference_is_base:
            self.ref = self.actor
        self.source, self.validator, self.tokenizer = source, validator, tokenizer
        self.tracking, self.timer = tracking, timer
        self.weights = WeightSync(
            config.actor_rollout_ref.rollout.weight_sync,
            config.trainer.plugins,
            groups["actor"],
            groups["rollout"] if config.actor_rollout_ref.rollout.placement != "process" else None,
            tracking,
        )
        self.checkpoints, self.preemption, self.fingerprint = checkpoints, preemption, fingerprint
        self.bad_steps = BadSteps(Path(config.trainer.default_local_dir), config.trainer.max_bad_steps)
        self.invariants = Invariants(config, plan.actor_mini_rows)
        self.estimator = Estimator.named(config.algorithm.adv_estimator)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.step, self.weight_version, self.metrics = 0, -1, {}  # type: int, int, dict[str, Any]
        self.weights_since = -1
        """The first version that had the rollout's weights."""
        self.weight_age = 0
        """Updates of the actor that the rollout's weights lack."""
        self.samples: list[list[Any]] = []

    def fit(self, last_step: int | None = None) -> dict[str, float]:
        """Trains to the last step, or to `last_step` without a save. Returns the last validation's metrics.

        Raises:
            Preempted: after SIGTERM.
        """
        self.sync_weights()
        trainer = self.config.trainer
        validation = self.validate() if trainer.val_only or (trainer.val_before_train and self.step == 0) else {}
        if trainer.val_only:
            return validation
        while self.step < (self.plan.total_steps if last_step is None else last_step):
            self.begin_step()
            batch = next(self.source)
            self.metrics.update({"training/weight_age": self.weight_age, "training/weight_version": self.weights_since})
            self.rest_rollout()
            with self.timer("old_log_prob"):
                batch = self.add_old_log_probs(batch)
            if self.ref is not None:
                with self.timer("ref"):
                    batch = batch.union(self.ref.compute_ref_log_prob(forward_inputs(batch)))
            if self.critic is not None:
                with self.timer("values"):
                    batch = batch.union(self.critic.compute_values(forward_inputs(batch)))
            with self.timer("adv"):
                batch = self.add_advantages(batch)
                trained = self.draw_rows(batch)
            if self.critic is not None:
                with self.timer("update_critic"):
                    self.update("critic", self.critic.update_critic, self.critic_batch(trained))
            if self.trains_actor:
                with self.timer("update_actor"):
                    self.update("actor", self.actor.update_actor, self.actor_batch(trained))
                self.weight_age += 1
                if self.is_due(self.config.actor_rollout_ref.rollout.weight_sync.frequency):
                    self.sync_weights()
            if self.is_due(self.config.trainer.test_freq):
                validation = self.validate()
            if last_step is None and self.is_due(self.config.trainer.save_freq):
                self.save()
            self.end_step(batch)
        return validation

    def begin_step(self) -> None:
        """Starts the clock and an empty set of metrics."""
        self.step += 1
        self.timer.pop()  # the first sync came before any step
        self._began = time.perf_counter()
        self.metrics = {}

    @property
    def trains_actor(self) -> bool:
        """Whether this step updates the actor, or the critic alone."""
        return self.critic is None or self.step > self.config.trainer.critic_warmup

    @property
    def records(self) -> bool:
        """Whether this step's updates are kept for a replay."""
        frequency = self.config.trainer.record_freq
        return frequency > 0 and self.step % frequency == 0

    def rest_rollout(self) -> None:
        """If so configured, lets the rollout give its memory back: of the weights too, if a sync brings new ones."""
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.free_cache_engine:
            brings_weights = self.trains_actor and self.is_due(rollout.weight_sync.frequency)
            brings_weights &= not rollout.weight_sync.adapter_only
            self.metrics["perf/rollout_freed_gb"] = sum(self.rollout.sleep(not brings_weights)) / 1e9

    def add_old_log_probs(self, batch: DataProto) -> DataProto:
        """Adds ``old_log_probs``, and what the rollout correction makes of their difference to the rollout's."""
        assert batch.batch is not None
        correction = self.config.algorithm.rollout_correction
        if correction.bypass_mode:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
            return batch
        batch = batch.union(self.actor.compute_log_prob(forward_inputs(batch)))
        tensors = batch.batch
        assert tensors is not None
        weights, kept, metrics = compute_rollout_correction(
            tensors["old_log_probs"],
            tensors["rollout_log_probs"],
            tensors["response_mask"],
            correction.rollout_is,
            correction.rollout_is_threshold,
            correction.rollout_is_batch_normalize,
            correction.rollout_rs,
            correction.rollout_rs_threshold,
        )
        self.metrics.update(metrics)
        # What is rejected still counts for advantages (its score may lie on a rejected token), not for the policy loss.
        columns = {"loss_mask": kept} | ({"rollout_is_weights": weights} if weights is not None else {})
        return batch.union(DataProto.from_dict(columns))

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Adds ``token_level_rewards``, ``advantages`` and ``returns``."""
        assert batch.batch is not None
        tensors, algorithm = batch.batch, self.config.algorithm
        rewards = tensors["token_level_scores"]
        if self.plan.use_kl_in_reward:
            rewards, kl = apply_kl_penalty(
                rewards,
                tensors["old_log_probs"],
                tensors["ref_log_prob"],
                tensors["response_mask"],
                self.kl_controller.value,
                algorithm.kl_penalty,
            )
            self.metrics.update(
                {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": self.kl_controller.value}
            )
            self.kl_controller.update(float(kl), len(batch))
        columns = advantages_of_scored(self.estimator, batch, rewards, algorithm)
        return batch.union(DataProto.from_dict({"token_level_rewards": rewards, **columns}))

    def draw_rows(self, batch: DataProto) -> DataProto:
        """The rows to train on: all, or as many drawn by PF-PPO."""
        assert batch.batch is not None
        algorithm = self.config.algorithm
        if not algorithm.use_pf_ppo:
            return batch
        seed = int(np.random.SeedSequence([self.config.trainer.seed, self.step]).generate_state(1)[0])
        scored = torch.nonzero(scored_rows(batch)).flatten()
        scores = batch.batch["token_level_scores"].sum(dim=-1)[scored]
        method, generator = algorithm.pf_ppo.reweight_method, torch.Generator().manual_seed(seed)
        rows = scored[pf_ppo_resample(scores, method, algorithm.pf_ppo.weight_pow, generator, len(batch))]
        self.metrics["pf_ppo/distinct"] = len(set(rows.tolist())) / len(rows)
        return batch.select_idxs(rows)

    def actor_batch(self, batch: DataProto) -> DataProto:
        """What the policy loss reads."""
        assert batch.batch is not None
        names = [*FORWARD_COLUMNS, "old_log_probs", "advantages"]
        names += ["ref_log_prob"] if self.config.actor_rollout_ref.actor.use_kl_loss else []
        names += ["rollout_is_weights"] if "rollout_is_weights" in batch.batch else []
        columns = {name: batch.batch[name] for name in names}
        columns["response_mask"] = batch.batch.get("loss_mask", columns["response_mask"])
        return by_shard(DataProto.from_dict(columns), self.plan.actor_mini_rows, self.plan.actor_shards)

    def critic_batch(self, batch: DataProto) -> DataProto:
        """What the value loss reads."""
        columns = [*FORWARD_COLUMNS, "values", "returns"]
        return by_shard(batch.select(columns, [], []), self.plan.critic_mini_rows, self.plan.critic_shards)

    def update(self, role: str, method: Any, batch: DataProto) -> None:
        """Calls the role's update and keeps its metrics; a batch that is not finite makes none."""
        if self.records:
            save_bundle(Path(self.config.trainer.default_local_dir) / RECORDED, Bundle(self.step, role, batch, []))
        updates = [{SKIPPED: 1.0}] if not_finite(batch) else method(batch)[0]
        self.metrics.update(self.bad_steps.note(role, self.step, batch, updates))
        first = updates[0]
        updates = [update for update in updates if SKIPPED not in update and EMPTY not in update]
        self.metrics.update(update_metrics(role, updates))
        if role == "actor" and "actor/ratio_dev_max" in first:  # a plug-in's loss may not report it
            # On the first mini-batch the policy is still the one that gave the old log-probs: the ratio must be 1. In
            # bypass mode those are the rollout's, and this is how far it is off.
            self.metrics["training/first_ratio_dev_max"] = first["actor/ratio_dev_max"]

    def rerun(self, batches: Mapping[str, DataProto]) -> dict[str, Any]:
        """Makes the next step's updates alone, on batches that were kept of it. Returns their metrics.

        Args:
            batches: by role, in the order of the updates.
        """
        self.begin_step()
        for role, batch in batches.items():
            with self.timer(f"update_{role}"):
                self.update(role, getattr(self.groups[role], f"update_{role}"), batch)
        return self.metrics

    def sync_weights(self) -> None:
        """Moves the actor's weights to the rollout under the next version, in one call."""
        with self.timer("weight_sync"):
            self.weight_version, metrics = self.rollout.syncing(lambda: self.weights(self.weight_version, self.step))
        self.source.min_version, self.weight_age = self.weight_version, 0
        self.weights_since = self.weight_version
        self.metrics.update(metrics)

    def refeed(self) -> None:
        """Gives a rollout that has been started anew the weights as they are now."""
        since = self.weights_since if not self.weight_age else None
        self.weights.reconnect()
        self.sync_weights()
        if since is not None:  # they are the ones it had
            self.weights_since = since

    def validate(self) -> dict[str, float]:
        """Validates and logs; before the first step at once, later with the step's metrics."""
        if self.validator is None:
            return {}
        with self.timer("testing"):
            metrics, samples = self.validator(self.weight_version)
        self.metrics.update(metrics)
        if self.step == 0 or self.config.trainer.val_only:
            self.tracking.log({**self.metrics, **self.timer.pop()}, step=self.step)
        self.samples = samples
        if self.config.trainer.val_only:
            self.show_samples()
        return metrics

    def show_samples(self) -> None:
        """The last validation's table, after the line of metrics that it belongs to."""
        if self.samples:
            title = f"validation samples, step {self.step}"
            self.tracking.table(title, ["prompt", "response", "ground truth", "score"], self.samples)

    def is_due(self, frequency: int) -> bool:
        """Every `frequency` steps (-1: never), and always at the last."""
        return self.step == self.plan.total_steps or (frequency > 0 and self.step % frequency == 0)

    def save(self) -> None:
        """Begins a checkpoint of this step; at the last, a Hugging Face export comes with it."""
        driver = {
            "weight_version": self.weight_version,
            "source": self.source.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "fingerprint": self.fingerprint,
            "bad_steps_in_a_row": self.bad_steps.in_a_row,
        }
        final = self.step == self.plan.total_steps
        with self.timer("save_checkpoint"):
            self.checkpoints.begin(self.step, driver, final=final)
            if final:
                export = (Path(self.config.trainer.default_local_dir) / "export").resolve()
                written = beside(export)
                self.actor.save_hf(str(written))
                self.tokenizer.save_pretrained(written)
                publish(written, export)

    def restore(self, resume: Resume) -> None:
        """Puts everything where it was after the checkpoint's step."""
        self.checkpoints.load(resume)
        driver = resume.driver
        self.step = resume.step
        self.source.load_state_dict(driver["source"])
        self.kl_controller.load_state_dict(driver["kl_controller"])
        self.bad_steps.in_a_row = dict(driver["bad_steps_in_a_row"])
        self.weight_version = driver["weight_version"] - 1  # the sync to come brings that version to the rollout anew
        set_random_state(driver["random"])

    def stop_if_asked(self, metrics: Mapping[str, Any]) -> None:
        """After SIGTERM: saves this step, if it is not saved yet, and ends the run.

        A run that goes on begins with a sync: at a step without one it would go on with other weights in the rollout.
        """
        synced = self.is_due(self.config.actor_rollout_ref.rollout.weight_sync.frequency)
        if not self.preemption.asked or self.step == self.plan.total_steps or not synced:
            return
        if not self.is_due(self.config.trainer.save_freq):
            self.save()
        self.checkpoints.commit(metrics, wait=True)
        raise Preempted(f"stopped by SIGTERM after step {self.step}; {self.checkpoints.state()}")

    def end_step(self, batch: DataProto) -> None:
        """Logs the step; then a checkpoint of it may count."""
        seconds = time.perf_counter() - self._began
        gaps = forward_metrics(batch, self.metrics["training/weight_age"])
        metrics = {**self.metrics, **batch.meta_info.get("metrics", {}), **gaps}
        metrics = {
            **metrics,
            **self.invariants(self.step, batch, metrics),
            **batch_metrics(batch, self.config.data.max_response_length),
            **throughput_metrics(batch, seconds, self.plan.ranks),
            **self.checkpoints.metrics(),
            **({"perf/rollout_restarts": self.rollout.restarts} if self.rollout.restarts else {}),
            **memory_metrics({**self.groups, "rollout": self.rollout}),
            **self.timer.pop(),
            "timing_s/step": seconds,
            "training/global_step": self.step,
            "training/epoch": self.source.epoch,
        }
        self.tracking.log(metrics, step=self.step)
        self.checkpoints.commit(metrics)
        self.stop_if_asked(metrics)
        if self.step == self.plan.total_steps:
            self.show_samples()


def forward_inputs(batch: DataProto) -> DataProto:
    """What a forward needs, and nothing else: less to move."""
    return batch.select(FORWARD_COLUMNS, [], [])


def by_shard(batch: DataProto, mini_rows: int, shards: int) -> DataProto:
    """Reorders rows so that contiguous shards hold each data-parallel rank's part of each mini-batch.

    Mini-batch i is the same set of rows for any number of shards, so the layout does not change what is learnt.
    """
    if shards == 1:
        return batch
    rows = len(batch)
    per_shard = mini_rows // shards
    order = [
        start + shard * per_shard + offset
        for shard in range(shards)
        for start in range(0, rows, mini_rows)
        for offset in range(per_shard)
    ]
    return batch.select_idxs(order)
