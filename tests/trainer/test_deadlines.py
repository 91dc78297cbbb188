"""Every call has its phase, and every key of a phase its calls."""

import dataclasses

import pytest

from podium.protocol.dispatch import registered_methods
from podium.trainer.config import GenerateConfig, PPOConfig, SFTConfig
from podium.trainer.deadlines import call_deadlines, longest, phase_of
from podium.workers.actor import ActorWorker
from podium.workers.critic import CriticWorker
from podium.workers.reference import ReferenceWorker
from podium.workers.reward_model import RewardModelTrainer, RewardModelWorker
from podium.workers.rollout.worker import RolloutWorker

ROLES = [ActorWorker, CriticWorker, ReferenceWorker, RewardModelWorker, RewardModelTrainer, RolloutWorker]
QUICK = {"memory_used", "checkpoint_bytes"}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.__name__)
def test_every_call_that_may_take_long_has_a_phase(role: type):
    deadlines = call_deadlines(PPOConfig().trainer, PPOConfig().actor_rollout_ref.rollout)
    assert set(registered_methods(role)) - QUICK <= set(deadlines)


@pytest.mark.parametrize("config", [PPOConfig(), SFTConfig(), GenerateConfig()], ids=lambda c: type(c).__name__)
def test_every_key_reaches_its_calls(config):
    trainer = config.trainer
    for number, field in enumerate(dataclasses.fields(trainer.deadlines), 1):
        setattr(trainer.deadlines, field.name, 10.0 * number)
    deadlines = call_deadlines(trainer)
    for number, field in enumerate(dataclasses.fields(trainer.deadlines), 1):
        limits = {limit for limit in deadlines.values() if limit.key == f"trainer.deadlines.{field.name}"}
        assert [(limit.seconds, f"{limit.phase}_s") for limit in limits] == [(10.0 * number, field.name)]
    assert longest(trainer, deadlines) == trainer.rpc_timeout_s == 1800


def test_what_is_not_set_is_as_for_any_call():
    config = PPOConfig()
    config.trainer.rpc_timeout_s = 7.0
    deadlines = call_deadlines(config.trainer, config.actor_rollout_ref.rollout)
    assert {limit.seconds for limit in deadlines.values() if limit.phase != "sync"} == {7.0}
    assert deadlines["sync_weights"].seconds > config.actor_rollout_ref.rollout.weight_sync.timeout_s
    assert deadlines["compute_rm_score"].phase == "score" and phase_of("update_critic") == "update"
