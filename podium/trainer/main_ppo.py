"""PPO and its relatives: ``python3 -m podium.trainer.main_ppo key=value ...`` (``--help`` lists the keys)."""

import dataclasses
from contextlib import closing, nullcontext
from typing import Any

from podium.trainer.cli import run_main
from podium.trainer.config import PPOConfig, check_config, parse_command_line
from podium.utils.errors import UserError


def main() -> None:
    """Reads the command line, checks everything that can be checked, and trains."""
    config, explicit = parse_command_line(PPOConfig, "python3 -m podium.trainer.main_ppo")
    check_config(config, explicit)
    train(config)


def train(config: PPOConfig) -> dict[str, float]:
    """Runs PPO as configured. Returns the last validation's metrics.

    Raises:
        UserError: bad input; before any worker is started wherever it can be known there.
    """
    # Heavy imports only now: a mistyped key is told without waiting for torch.
    from podium.trainer.chat import load_chat_tokenizer
    from podium.trainer.launch import resolve_device, worker_groups
    from podium.trainer.plugins import load_plugins
    from podium.trainer.ppo.plan import make_plan
    from podium.trainer.ppo.preflight import check_rewards, check_rollout_correction
    from podium.trainer.ppo.roles import build_roles, check_models, check_reward_tokenizer
    from podium.utils.dataset import EpochLoader
    from podium.utils.tracking import Tracking, check_loggers, make_run_dir
    from podium.workers.reward.build import build_scorer
    from podium.workers.reward.manager import RewardManager

    check_loggers(config.trainer.logger)
    load_plugins(config.trainer.plugins)
    check_rollout_correction(config)
    device = resolve_device(config.trainer.device)
    check_models(config, device)
    tokenizer = load_chat_tokenizer(
        config.actor_rollout_ref.model.path,
        config.data,
        config.data.trust_remote_code,
        "actor_rollout_ref.model.path",
    )
    if config.reward_model.enable:
        check_reward_tokenizer(config.reward_model.model, tokenizer)
    train_set = _dataset(config, tokenizer, "train_files")
    val_set = _dataset(config, tokenizer, "val_files") if config.data.val_files else None
    if val_set is None and (config.trainer.val_before_train or config.trainer.val_only or config.trainer.test_freq > 0):
        raise UserError("data.val_files is not set: give it, or set trainer.val_before_train=false and no test_freq")
    plan = make_plan(config, len(train_set))
    roles = build_roles(config, plan, tokenizer)
    function, reward = config.custom_reward_function, None
    if function.path is not None or not config.reward_model.enable:
        scorer = build_scorer(config.reward_model, function)
        reward = RewardManager(scorer, tokenizer, max_failure_rate=config.reward_model.max_failure_rate)
        check_rewards(config, reward, [train_set] if val_set is None else [train_set, val_set])
    make_run_dir(config.trainer.default_local_dir)
    if reward is not None:
        reward.failures.keep_in(config.trainer.default_local_dir)
    print(f"data  train: {train_set.report}" + (f"; validation: {val_set.report}" if val_set is not None else ""))
    print(plan.describe(config), flush=True)
    loader = EpochLoader(len(train_set), config.data.train_batch_size, config.data.seed, config.data.shuffle)
    scoring = closing(reward) if reward is not None else nullcontext()
    with scoring, worker_groups(config.trainer, device, roles, "ppo") as groups:
        for group in groups.values():
            group.init_model()
        with Tracking(
            config.trainer.logger,
            config.trainer.default_local_dir,
            config.trainer.project_name,
            config.trainer.experiment_name,
            dataclasses.asdict(config),
            plan.total_steps,
        ) as tracking:
            trainer = _trainer(config, plan, groups, train_set, val_set, loader, reward, tokenizer, tracking)
            validation = trainer.fit()
    print(f"run directory: {config.trainer.default_local_dir}", flush=True)
    return validation


def _dataset(config: PPOConfig, tokenizer: Any, which: str) -> Any:
    from podium.trainer.chat import chat_options
    from podium.utils.dataset import PromptDataset

    data = config.data
    return PromptDataset(
        getattr(data, which),
        tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        chat=chat_options(data),
        key=f"data.{which}",
    )


def _trainer(
    config: PPOConfig,
    plan: Any,
    groups: dict[str, Any],
    train_set: Any,
    val_set: Any,
    loader: Any,
    reward: Any,
    tokenizer: Any,
    tracking: Any,
) -> Any:
    from podium.trainer.ppo.dynamic_sampling import DynamicSampling
    from podium.trainer.ppo.model_reward import ModelReward
    from podium.trainer.ppo.scoring import Scoring
    from podium.trainer.ppo.source import RolloutSource, SyncSource
    from podium.trainer.ppo.trainer import PPOTrainer
    from podium.trainer.ppo.validation import Validator
    from podium.utils.timing import PhaseTimer

    timer = PhaseTimer()
    rollout, scores = config.actor_rollout_ref.rollout, config.reward_model
    model = ModelReward(groups["reward_model"], scores) if plan.use_reward_model else None
    source: RolloutSource = SyncSource(
        train_set,
        loader,
        groups["rollout"],
        Scoring(reward, scores.overlong_buffer, config.data.max_response_length, model, scores.function_weight),
        timer,
        n=rollout.n,
        sampling={"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k},
        seed=config.trainer.seed,
        pad_token_id=tokenizer.pad_token_id,
        max_prompt_length=config.data.max_prompt_length,
        greedy_baseline=plan.use_greedy_baseline,
    )
    groups_filter = config.algorithm.filter_groups
    if groups_filter.enable:
        prompts = config.data.train_batch_size
        source = DynamicSampling(source, groups_filter.metric, prompts, groups_filter.max_num_gen_batches)
    validator = Validator(config, val_set, groups["rollout"], reward, tokenizer, model) if val_set is not None else None
    return PPOTrainer(config, plan, groups, source, validator, tokenizer, tracking, timer)


if __name__ == "__main__":
    run_main(main)
