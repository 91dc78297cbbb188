"""Where the rollout runs, and what goes together there."""

import re

import pytest

from podium.trainer.config import GenerateConfig, PPOConfig, check_config, check_generate_config, load_config
from podium.trainer.config.placement import rollout_ranks
from podium.utils.errors import UserError

ROLLOUT = "actor_rollout_ref.rollout."
APART = (f"{ROLLOUT}placement=apart", f"{ROLLOUT}n_gpus_per_node=4")


def check(*argv: str) -> int:
    """Ranks of the rollout, where all is well."""
    config, explicit = load_config(PPOConfig, list(argv))
    check_config(config, explicit)
    return rollout_ranks(config.actor_rollout_ref.rollout, config.trainer.nnodes * config.trainer.n_gpus_per_node)


def test_ranks_of_the_rollout():
    assert check() == 1
    assert check("trainer.n_gpus_per_node=2", f"{ROLLOUT}placement=device") == 2
    assert check(*APART, f"{ROLLOUT}nnodes=2", f"{ROLLOUT}tensor_model_parallel_size=4") == 8


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((f"{ROLLOUT}placement=here",), "expected process or device or apart"),
        ((f"{ROLLOUT}placement=apart",), "n_gpus_per_node is not set"),
        ((f"{ROLLOUT}n_gpus_per_node=2",), "no effect without actor_rollout_ref.rollout.placement=apart"),
        ((f"{ROLLOUT}tensor_model_parallel_size=2",), "=2 does not divide the rollout's 1 rank(s)"),
        ((*APART, f"{ROLLOUT}tensor_model_parallel_size=3"), "=3 does not divide the rollout's 4 rank(s)"),
        ((*APART, f"{ROLLOUT}name=hf", f"{ROLLOUT}tensor_model_parallel_size=2"), "name=hf keeps whole models"),
        ((*APART, f"{ROLLOUT}weight_sync.transport=colocated"), "placement=apart: use auto or ipc or broadcast"),
        ((f"{ROLLOUT}weight_sync.transport=ipc",), "placement=process: use auto or colocated or memory_buffer"),
        ((f"{ROLLOUT}weight_sync.transport=memory_buffer",), "actor_rollout_ref.actor.strategy is fsdp: use auto or"),
        ((*APART, f"{ROLLOUT}free_cache_engine=true"), "free_cache_engine has no effect with"),
        ((f"{ROLLOUT}weight_sync.bucket_megabytes=0",), "expected at least 1"),
    ],
)
def test_what_does_not_fit(argv: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        check(*argv)


def test_generation_has_all_ranks_for_itself():
    with pytest.raises(UserError, match=r"rollout\.placement has no effect without a trainer"):
        check_generate_config(*load_config(GenerateConfig, ["rollout.placement=device"]))
    with pytest.raises(UserError, match=r"rollout\.tensor_model_parallel_size=2 does not divide"):
        check_generate_config(*load_config(GenerateConfig, ["rollout.tensor_model_parallel_size=2"]))
