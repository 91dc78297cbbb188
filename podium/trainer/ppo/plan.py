"""The resolved plan of a run: batch-size arithmetic done once, checked, and printed before anything starts."""

from dataclasses import dataclass

from podium.trainer.config.placement import reward_ranks, rollout_ranks
from podium.trainer.config.ppo import PPOConfig
from podium.trainer.layout import data_parallel_size, engine_name, offload_line
from podium.trainer.ppo.estimator import Estimator
from podium.utils.errors import UserError

GROUP_ESTIMATORS = (
    "grpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "grpo_passk",
    "gdpo",
    "optimal_token_baseline",
)
"""Estimators that compare a response with others to the same prompt."""


@dataclass(frozen=True)
class Plan:
    """Who runs where, and how many sequences each rank has in each phase."""

    ranks: int
    """Of the trainer."""
    rollout_ranks: int
    reward_ranks: int
    """Of the reward model's own; 0 where it is in the trainer's processes, or there is none."""
    actor_shards: int
    """Data-parallel shards of the actor's engine: a mini-batch is divided over them."""
    critic_shards: int
    use_critic: bool
    use_reference: bool
    reference_is_base: bool
    """With LoRA: the reference is the frozen base of the actor's model, and no role of its own."""
    use_kl_in_reward: bool
    use_reward_model: bool
    use_greedy_baseline: bool
    """Each prompt is answered greedily too."""
    use_sum_pi_squared: bool
    """The forward for old log-probs gives the sums of squared probabilities too."""
    steps_per_epoch: int
    total_steps: int
    rows: int
    """Sequences in an iteration, over all ranks: prompts times rollout.n."""
    actor_mini_rows: int
    """Sequences in an optimizer step of the actor, over all ranks."""
    critic_mini_rows: int
    actor_micro_rows: int
    """Sequences of one data-parallel shard in one forward and backward."""
    critic_micro_rows: int
    log_prob_micro_rows: int
    ref_micro_rows: int
    reward_micro_rows: int
    actor_updates: int
    """Optimizer steps of the actor in the whole run."""
    critic_updates: int
    critic_epochs: int

    def describe(self, config: PPOConfig, device: str) -> str:
        """The plan as lines for the console.

        Args:
            device: ``cpu`` or ``cuda``.
        """
        reference = "ref (the actor's base)" if self.reference_is_base else "ref"
        roles = ["actor", *(["critic"] * self.use_critic), *([reference] * self.use_reference)]
        judge = "judge" if config.reward_model.style == "generative" else "reward model"
        roles += [judge] * (self.use_reward_model and not self.reward_ranks)
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        engine = engine_name(actor.strategy, actor.megatron, config.actor_rollout_ref.model.lora_rank)
        tp = rollout.tensor_model_parallel_size
        generator = f"rollout {rollout.name}" + (f", {tp} ranks a copy" if tp > 1 else "")
        roles += ["rollout"] * (rollout.placement == "process")
        own = {
            "process": "",
            "device": ", its processes beside the trainer's",
            "apart": f" on {self.rollout_ranks} others",
        }
        lines = [
            f"{self.ranks} rank(s) on the {config.trainer.backend} backend, each with {', '.join(roles)}; "
            f"engine {engine}, {generator}{own[rollout.placement]}"
            + (f", {judge} on {self.reward_ranks} others" if self.reward_ranks else ""),
            f"{self.total_steps} steps ({self.steps_per_epoch} an epoch): {config.data.train_batch_size} prompts x "
            f"{rollout.n} = {self.rows} sequences a step, {self.rows // self.ranks} a rank"
            + (", and a greedy one for each prompt" if self.use_greedy_baseline else ""),
            f"actor: mini-batch {self._share(self.actor_mini_rows, self.actor_shards)}, "
            f"micro-batch {self.actor_micro_rows}), {self.actor_updates} optimizer steps in all",
        ]
        if rollout.weight_sync.frequency > 1:
            lines.append(
                f"rollout: new weights every {rollout.weight_sync.frequency} steps, so responses are up to "
                f"{rollout.weight_sync.frequency - 1} steps off-policy (algorithm.rollout_correction corrects for it)"
            )
        if self.use_critic:
            lines.append(
                f"critic: mini-batch {self._share(self.critic_mini_rows, self.critic_shards)}, "
                f"micro-batch {self.critic_micro_rows}), {self.critic_updates} optimizer steps in all"
            )
        strategy, ref = actor.strategy, config.actor_rollout_ref.ref
        lines.append(offload_line("actor", strategy, actor, device))
        if self.use_critic:
            lines.append(offload_line("critic", config.critic.strategy, config.critic, device))
        if self.use_reference and not self.reference_is_base:
            lines.append(offload_line("ref", strategy, ref, device))
        if self.use_reward_model:
            model = config.reward_model
            lines.append(offload_line("reward model", model.strategy, model, device))
        return "\n".join(f"plan  {line}" for line in lines if line)

    def _share(self, rows: int, shards: int) -> str:
        """A mini-batch, the part of one data-parallel shard, and how many ranks work on that together."""
        together = self.ranks // shards
        return f"{rows} sequences ({rows // shards} " + ("a rank" if together == 1 else f"for each {together} ranks")


def make_plan(config: PPOConfig, dataset_rows: int) -> Plan:
    """Checks the arithmetic of `config` against a training set of `dataset_rows` prompts.

    Raises:
        UserError: something does not divide, is not set, or does not fit together; with the numbers.
    """
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    trainer, algorithm, critic = config.trainer, config.algorithm, config.critic
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    n = rollout.n
    if ranks < 1 or n < 1:
        raise UserError(
            f"trainer.nnodes={trainer.nnodes}, trainer.n_gpus_per_node={trainer.n_gpus_per_node} and "
            f"actor_rollout_ref.rollout.n={n} must all be at least 1"
        )
    if n == 1 and algorithm.adv_estimator in GROUP_ESTIMATORS:
        raise UserError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares responses to the same prompt, and "
            "actor_rollout_ref.rollout.n=1 leaves nothing to compare: set it to 2 or more"
        )
    if dataset_rows < data.train_batch_size:
        raise UserError(f"data.train_batch_size={data.train_batch_size}, but data.train_files has {dataset_rows} rows")
    reads = Estimator.named(algorithm.adv_estimator).reads
    if "sum_pi_squared" in reads and algorithm.rollout_correction.bypass_mode:
        raise UserError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} reads sum_pi_squared from the forward that "
            "algorithm.rollout_correction.bypass_mode=true leaves out: remove one of the two"
        )
    use_critic = "values" in reads
    use_kl_in_reward = algorithm.use_kl_in_reward
    if use_kl_in_reward is None:
        use_kl_in_reward = algorithm.kl_ctrl.kl_coef > 0
    micro = _required(actor.ppo_micro_batch_size_per_gpu, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    critic_mini = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    actor_shards = data_parallel_size("actor_rollout_ref.actor", actor.strategy, actor.megatron, ranks)
    critic_shards = data_parallel_size("critic", critic.strategy, critic.megatron, ranks)
    for key, mini, shards in (
        ("actor_rollout_ref.actor.ppo_mini_batch_size", actor.ppo_mini_batch_size, actor_shards),
        ("critic.ppo_mini_batch_size", critic_mini, critic_shards),
    ):
        _check_division(key, mini, data.train_batch_size, n, shards)
    model = config.reward_model
    if model.enable and model.style == "discriminative":
        data_parallel_size("reward_model", model.strategy, model.megatron, reward_ranks(model) or ranks)
    steps_per_epoch = dataset_rows // data.train_batch_size
    total_steps = trainer.total_training_steps or steps_per_epoch * trainer.total_epochs
    critic_epochs = critic.ppo_epochs or actor.ppo_epochs
    actor_steps = max(0, total_steps - (trainer.critic_warmup if use_critic else 0))
    return Plan(
        ranks=ranks,
        rollout_ranks=rollout_ranks(rollout, ranks),
        reward_ranks=reward_ranks(model),
        actor_shards=actor_shards,
        critic_shards=critic_shards,
        use_critic=use_critic,
        use_reference=use_kl_in_reward or actor.use_kl_loss,
        reference_is_base=config.actor_rollout_ref.model.lora_rank > 0,
        use_kl_in_reward=use_kl_in_reward,
        use_reward_model=model.enable,
        use_greedy_baseline="reward_baselines" in reads,
        use_sum_pi_squared="sum_pi_squared" in reads,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        rows=data.train_batch_size * n,
        actor_mini_rows=actor.ppo_mini_batch_size * n,
        critic_mini_rows=critic_mini * n,
        actor_micro_rows=micro,
        critic_micro_rows=critic.ppo_micro_batch_size_per_gpu or micro,
        log_prob_micro_rows=rollout.log_prob_micro_batch_size_per_gpu or micro,
        ref_micro_rows=config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu or micro,
        reward_micro_rows=model.micro_batch_size_per_gpu or micro,
        actor_updates=actor_steps * actor.ppo_epochs * (data.train_batch_size // actor.ppo_mini_batch_size),
        critic_updates=total_steps * critic_epochs * (data.train_batch_size // critic_mini),
        critic_epochs=critic_epochs,
    )


def _required(value: int | None, key: str) -> int:
    if value is None:
        raise UserError(f"{key} is not set: the sequences that fit in one forward and backward on one rank")
    if value < 1:
        raise UserError(f"{key}={value}: expected at least 1")
    return value


def _check_division(key: str, mini: int, batch: int, n: int, shards: int) -> None:
    if mini < 1 or batch % mini:
        raise UserError(
            f"{key}={mini} does not divide data.train_batch_size={batch} (both count prompts): "
            f"{batch} / {mini} = {batch / mini if mini else 0:.2f} mini-batches"
        )
    if mini * n % shards:
        raise UserError(
            f"{key}={mini} prompts x actor_rollout_ref.rollout.n={n} = {mini * n} sequences do not divide over "
            f"{shards} data-parallel ranks: {mini * n} / {shards} = {mini * n / shards:.2f}"
        )
