"""PPO and its relatives: ``python3 -m podium.trainer.main_ppo key=value ...`` (``--help`` lists the keys)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from podium.trainer.cli import run_main
from podium.trainer.config import PPOConfig, check_config, parse_command_line
from podium.trainer.config.scoring import has_function
from podium.utils.errors import UserError

if TYPE_CHECKING:
    from podium.trainer.ppo.trainer import PPOTrainer


def main() -> None:
    """Reads the command line, checks everything that can be checked, and trains."""
    config, explicit = parse_command_line(PPOConfig, "python3 -m podium.trainer.main_ppo")
    check_config(config, explicit)
    train(config)


def train(
    config: PPOConfig, last_step: int | None = None, after: Callable[[PPOTrainer], None] | None = None
) -> dict[str, float]:
    """Runs PPO as configured. Returns the last validation's metrics.

    Args:
        last_step: stop after this one, as if killed there; nothing else is as in a shorter run.
        after: called with the loop when that step is done and the workers are still there.

    Raises:
        UserError: bad input; before any worker is started wherever it can be known there.
    """
    # Heavy imports only now: a mistyped key is told without waiting for torch.
    from podium.trainer.chat import load_chat_tokenizer
    from podium.trainer.launch import resolve_device
    from podium.trainer.plugins import load_plugins
    from podium.trainer.ppo.data import prompt_dataset, train_order
    from podium.trainer.ppo.plan import make_plan
    from podium.trainer.ppo.preflight import check_rewards, check_rollout_correction, check_transport
    from podium.trainer.ppo.reward_reader import check_reader, reward_reader
    from podium.trainer.ppo.roles import build_roles, check_models
    from podium.trainer.ppo.run import PPORun
    from podium.trainer.resume import resume_run
    from podium.utils.redact import redact
    from podium.utils.run_lock import only_run
    from podium.utils.tracking import check_loggers, make_run_dir
    from podium.workers.reward.build import build_scorer
    from podium.workers.reward.manager import RewardManager

    check_loggers(config.trainer.logger)
    load_plugins(config.trainer.plugins)
    check_rollout_correction(config)
    check_transport(config)
    device = resolve_device(config.trainer.device)
    check_models(config, device)
    tokenizer = load_chat_tokenizer(
        config.actor_rollout_ref.model.path,
        config.data,
        config.data.trust_remote_code,
        "actor_rollout_ref.model.path",
    )
    reader = reward_reader(config.reward_model, tokenizer) if config.reward_model.enable else None
    train_set = prompt_dataset(config.data, tokenizer, "train_files")
    val_set = prompt_dataset(config.data, tokenizer, "val_files") if config.data.val_files else None
    if val_set is None and (config.trainer.val_before_train or config.trainer.val_only or config.trainer.test_freq > 0):
        raise UserError("data.val_files is not set: give it, or set trainer.val_before_train=false and no test_freq")
    plan = make_plan(config, len(train_set))
    train_order(config.data, train_set)  # a bad one is told now
    roles = build_roles(config, plan, tokenizer, reader.tokenizer if reader is not None else None)
    datasets = [train_set] if val_set is None else [train_set, val_set]
    if reader is not None:
        check_reader(reader, datasets)
    function, reward = config.custom_reward_function, None
    if has_function(config.reward_model, function) or not config.reward_model.enable:
        scorer = build_scorer(config.reward_model, function)
        reward = RewardManager(scorer, tokenizer, max_failure_rate=config.reward_model.max_failure_rate)
        check_rewards(config, reward, datasets)
    with only_run(make_run_dir(config.trainer.default_local_dir)):
        plain = redact(dataclasses.asdict(config))
        resume = resume_run(config.trainer, plain, train_set.fingerprint(), plan.total_steps)
        if resume is not None and resume.step >= plan.total_steps and not config.trainer.val_only:
            return {}
        print(f"data  train: {train_set.report}" + (f"; validation: {val_set.report}" if val_set is not None else ""))
        print(plan.describe(config, device), flush=True)
        if reward is not None:
            reward.failures.keep_in(config.trainer.default_local_dir)
        run = PPORun(config, plain, plan, device, roles, train_set, val_set, reward, tokenizer, reader)
        with closing(reward) if reward is not None else nullcontext():
            validation = run.train(resume, last_step, after)
    print(f"run directory: {config.trainer.default_local_dir}", flush=True)
    return validation


if __name__ == "__main__":
    run_main(main)
