"""One PPO run from what has been checked: its processes, its files and its loop."""

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.protocol import ClassWithInitArgs, WorkerDied, WorkerGroup, WorkerTimeout
from podium.trainer.blame import STACKS, blaming
from podium.trainer.checkpoint import Checkpoints
from podium.trainer.config.ppo import PPOConfig
from podium.trainer.config_history import note_config
from podium.trainer.launch import worker_groups
from podium.trainer.out_of_memory import PPO_KEYS, naming_keys
from podium.trainer.ppo.data import train_order
from podium.trainer.ppo.dynamic_sampling import DynamicSampling
from podium.trainer.ppo.model_reward import ModelReward
from podium.trainer.ppo.plan import Plan
from podium.trainer.ppo.reward_reader import Reader
from podium.trainer.ppo.rollout_client import RolloutClient
from podium.trainer.ppo.scoring import Scoring
from podium.trainer.ppo.source import RolloutSource, SyncSource
from podium.trainer.ppo.streaming import steps_at_once
from podium.trainer.ppo.text_scores import build_model_reward
from podium.trainer.ppo.trainer import PPOTrainer
from podium.trainer.ppo.validation import Validator
from podium.trainer.preemption import Preempted, Preemption
from podium.trainer.resume import Resume, newest_whole
from podium.trainer.run_files import run_files
from podium.utils.dataset import PromptDataset
from podium.utils.timing import PhaseTimer
from podium.utils.tracking import Tracking
from podium.workers.reward.manager import RewardManager


@dataclass(frozen=True)
class PPORun:
    """What a run is made of, before any process is started.

    Args:
        plain: the configuration as plain values, without secrets: what is written down of it.
        device: ``cpu`` or ``cuda``.
        roles: worker classes by role, in the order in which a process builds them.
        reward: None where a reward model alone scores.
        reader: of a reward model that reads text.
    """

    config: PPOConfig
    plain: Mapping[str, Any]
    plan: Plan
    device: str
    roles: dict[str, ClassWithInitArgs]
    train_set: PromptDataset
    val_set: PromptDataset | None
    reward: RewardManager | None
    tokenizer: Any
    reader: Reader | None = None

    def train(
        self,
        resume: Resume | None,
        last_step: int | None = None,
        after: Callable[[PPOTrainer], None] | None = None,
    ) -> dict[str, float]:
        """Starts the processes and trains to the last step. Returns the last validation's metrics.

        Args:
            last_step: stop there already.
            after: called with the loop when that is done and the workers are still there.

        Raises:
            WorkerDied, WorkerTimeout: once more than ``max_restarts`` allows.
        """
        preemption = Preemption(self.config.trainer.preempt_grace_s)
        for restart in itertools.count(1):
            try:
                return self._attempt(resume, last_step, after, preemption)
            except (WorkerDied, WorkerTimeout) as error:
                if preemption.asked:
                    raise Preempted(f"stopped by SIGTERM, and by {error}; {preemption.state()}") from error
                if restart > self.config.trainer.max_restarts:
                    raise
                resume = newest_whole(Path(self.config.trainer.default_local_dir).expanduser()) or resume
                print(
                    f"{error}\nrestart {restart} of {self.config.trainer.max_restarts}: "
                    + (f"after step {resume.step}, from {resume.folder}" if resume else "from the start"),
                    file=sys.stderr,
                    flush=True,
                )
        raise AssertionError("unreachable")

    def _attempt(
        self,
        resume: Resume | None,
        last_step: int | None,
        after: Callable[[PPOTrainer], None] | None,
        preemption: Preemption,
    ) -> dict[str, float]:
        trainer = self.config.trainer
        run_dir = Path(trainer.default_local_dir).expanduser().resolve()
        # The signal is caught inside of what starts Ray, which catches it, too.
        rollout = self.config.actor_rollout_ref.rollout
        own_pool = self.config.reward_model if self.plan.reward_ranks else None
        with (
            worker_groups(trainer, self.device, self.roles, "ppo", rollout, run_dir / STACKS, own_pool) as groups,
            preemption(),
            blaming(run_dir),
            naming_keys(PPO_KEYS, "data.max_response_length"),
        ):
            for group in groups.values():
                group.init_model()
            trained = {name: group for name, group in groups.items() if name in ("actor", "critic")}
            with run_files(trainer, run_dir, self.plain, self.plan.total_steps, resume, trained, preemption) as files:
                note_config(run_dir, resume.step if resume is not None else 0, self.plain)
                loop = self._loop(groups, *files, preemption)
                if resume is not None:
                    loop.restore(resume)
                validation = loop.fit(last_step)
                if after is not None:
                    after(loop)
                return validation

    def _loop(
        self, groups: dict[str, WorkerGroup], tracking: Tracking, checkpoints: Checkpoints, preemption: Preemption
    ) -> PPOTrainer:
        config, timer = self.config, PhaseTimer()
        model = None
        if self.plan.use_reward_model:
            group, run_dir = groups["reward_model"], Path(config.trainer.default_local_dir)
            model = build_model_reward(
                config.reward_model, group, self.reader, self.tokenizer, run_dir, config.trainer.seed
            )
        own = config.actor_rollout_ref.rollout
        most = own.max_restarts if own.placement != "process" else 0
        rollout = RolloutClient(groups["rollout"], most, Path(config.trainer.default_local_dir).expanduser())
        validator = None
        if self.val_set is not None:
            validator = Validator(config, self.val_set, rollout, self.reward, self.tokenizer, model)
        return PPOTrainer(
            config,
            self.plan,
            groups,
            rollout,
            self._source(rollout, model, timer),
            validator,
            self.tokenizer,
            tracking,
            timer,
            checkpoints,
            preemption,
            self.train_set.fingerprint(),
        )

    def _source(self, rollout: RolloutClient, model: ModelReward | None, timer: PhaseTimer) -> RolloutSource:
        config, data, scores = self.config, self.config.data, self.config.reward_model
        sampling = config.actor_rollout_ref.rollout
        source: RolloutSource = SyncSource(
            self.train_set,
            train_order(data, self.train_set),
            rollout,
            Scoring(self.reward, scores.overlong_buffer, data.max_response_length, model, scores.function_weight),
            timer,
            n=sampling.n,
            sampling={"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
            seed=config.trainer.seed,
            pad_token_id=self.tokenizer.pad_token_id,
            max_prompt_length=data.max_prompt_length,
            greedy_baseline=self.plan.use_greedy_baseline,
            steps_at_once=steps_at_once(data.max_response_length),
        )
        groups_filter = config.algorithm.filter_groups
        if groups_filter.enable:
            source = DynamicSampling(
                source, groups_filter.metric, data.train_batch_size, groups_filter.max_num_gen_batches
            )
        return source
