"""How engines divide the ranks."""

import pytest

from podium.trainer.config import PPOConfig, load_config
from podium.trainer.config.shared import MegatronConfig
from podium.trainer.layout import data_parallel_size, engine_name
from podium.trainer.ppo.plan import make_plan
from podium.utils.errors import UserError

KEY = "actor_rollout_ref.actor"


def megatron(**sizes: int) -> MegatronConfig:
    names = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "cp": "context", "ep": "expert"}
    keys = {name: f"{whole}_{'' if name == 'cp' else 'model_'}parallel_size" for name, whole in names.items()}
    return MegatronConfig(**{keys[name]: size for name, size in sizes.items()})


def test_fsdp_gives_every_rank_a_shard():
    assert data_parallel_size(KEY, "fsdp", megatron(tp=2), 6) == 6


def test_megatron_gives_every_copy_of_the_model_one():
    assert data_parallel_size(KEY, "megatron", megatron(tp=2, pp=3, vpp=2, cp=2), 24) == 2
    assert data_parallel_size(KEY, "megatron", megatron(ep=4), 8) == 8


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        ({"tp": 2, "pp": 2}, 6, r"^actor_rollout_ref\.actor\.megatron: 6 ranks do not divide .* 2 x 2 x 1"),
        ({"ep": 3}, 4, "expert_model_parallel_size=3"),
    ],
)
def test_ranks_that_do_not_divide(sizes, ranks, message):
    with pytest.raises(UserError, match=message):
        data_parallel_size(KEY, "megatron", megatron(**sizes), ranks)


def test_names_have_the_sizes():
    assert engine_name("fsdp", megatron(tp=2), 0) == "fsdp"
    assert engine_name("fsdp", megatron(), 8) == "fsdp with LoRA of rank 8"
    assert engine_name("megatron", megatron(tp=2, pp=2, vpp=2), 0) == "megatron (tp2 pp2 vpp2)"


def test_a_plan_divides_mini_batches_over_the_shards_of_each_role():
    argv = [f"{KEY}.ppo_micro_batch_size_per_gpu=4", f"{KEY}.strategy=megatron", "trainer.n_gpus_per_node=6"]
    argv += [f"{KEY}.megatron.tensor_model_parallel_size=3", "data.train_batch_size=12", f"{KEY}.ppo_mini_batch_size=4"]
    config, _ = load_config(PPOConfig, [*argv, "critic.ppo_mini_batch_size=12"])
    plan = make_plan(config, 120)
    assert (plan.ranks, plan.actor_shards, plan.critic_shards) == (6, 2, 6)
    text = plan.describe(config, "cpu")
    assert "engine megatron (tp3)" in text
    assert "actor: mini-batch 4 sequences (2 for each 3 ranks, micro-batch 4)" in text
    assert "critic: mini-batch 12 sequences (2 a rank, micro-batch 4)" in text
    config.critic.ppo_mini_batch_size = 4
    with pytest.raises(UserError, match=r"do not divide over 6 data-parallel ranks: 4 / 6 = 0.67"):
        make_plan(config, 120)
