"""The small task, and the real roles on it in this process.

Their imports are inside the fixtures: the tests of the pure functions below this folder run without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from podium.trainer.config import PPOConfig, load_config
from podium.workers.weight_sync.groups import connect_groups, sync_groups
from podium.workers.weight_sync.transport.base import SyncSettings
from tests.small_task import SmallTask, make_small_task

if TYPE_CHECKING:
    from podium.protocol import WorkerGroup
    from podium.trainer.ppo.plan import Plan
    from podium.utils.dataset import PromptDataset
    from podium.workers.reward.manager import RewardManager


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> SmallTask:
    return make_small_task(tmp_path_factory.mktemp("task"))


@dataclass(frozen=True)
class Parts:
    """What `main_ppo` puts together, up to the trainer."""

    config: PPOConfig
    plan: Plan
    tokenizer: Any
    train: PromptDataset
    val: PromptDataset
    reward: RewardManager
    groups: dict[str, WorkerGroup]


def prompts(config: PPOConfig, file: Path, tokenizer: Any) -> PromptDataset:
    from podium.utils.dataset import PromptDataset

    return PromptDataset(str(file), tokenizer, max_prompt_length=config.data.max_prompt_length)


@pytest.fixture(scope="module")
def parts(task: SmallTask) -> Iterator[Parts]:
    """PPO with a KL in the loss, one rank in this process, weights synced as version 0."""
    from podium.trainer.launch import worker_groups
    from podium.trainer.ppo.plan import make_plan
    from podium.trainer.ppo.roles import build_roles
    from podium.utils.tokenizer import load_tokenizer
    from podium.workers.reward.build import build_scorer
    from podium.workers.reward.manager import RewardManager

    argv = task.ppo(Path("nowhere"), actor_rollout_ref__actor__use_kl_loss="true", trainer__seed=3)
    config, _ = load_config(PPOConfig, argv)
    tokenizer = load_tokenizer(str(task.model))
    train, val = (prompts(config, file, tokenizer) for file in (task.train, task.val))
    plan = make_plan(config, len(train))
    reward = RewardManager(build_scorer(config.reward_model, config.custom_reward_function), tokenizer)
    roles = build_roles(config, plan, tokenizer)
    with closing(reward), worker_groups(config.trainer, "cpu", roles, "ppo") as groups:
        for group in groups.values():
            group.init_model()
        connect_groups([groups["actor"]], "colocated", SyncSettings())
        sync_groups([groups["actor"]], 0)
        yield Parts(config, plan, tokenizer, train, val, reward, groups)
