"""Batch-size arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.trainer.config import PPOConfig, load_config
from podium.trainer.ppo.plan import Plan, make_plan
from podium.utils.errors import UserError

ACTOR = "actor_rollout_ref.actor."
MICRO = f"{ACTOR}ppo_micro_batch_size_per_gpu=4"


def plan(*argv: str, rows: int = 1000) -> Plan:
    return make_plan(load_config(PPOConfig, [MICRO, *argv])[0], rows)


def test_the_issues_job():
    result = plan("data.train_batch_size=256", "trainer.critic_warmup=3", "trainer.total_epochs=2", rows=16384)
    assert (result.steps_per_epoch, result.total_steps) == (64, 128)
    assert (result.rows, result.actor_mini_rows, result.critic_mini_rows) == (256, 256, 256)
    assert (result.actor_updates, result.critic_updates) == (125, 128)


def test_what_is_not_set_follows_the_actor():
    result = plan(f"{ACTOR}ppo_epochs=3", f"{ACTOR}ppo_mini_batch_size=64")
    assert result.critic_epochs == 3 and result.critic_mini_rows == 64
    assert result.critic_micro_rows == result.log_prob_micro_rows == result.ref_micro_rows == 4
    own = plan(
        "critic.ppo_epochs=1",
        "critic.ppo_mini_batch_size=128",
        "critic.ppo_micro_batch_size_per_gpu=5",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=6",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7",
        f"{ACTOR}ppo_epochs=3",
    )
    assert (own.critic_epochs, own.critic_mini_rows, own.critic_micro_rows) == (1, 128, 5)
    assert (own.log_prob_micro_rows, own.ref_micro_rows, own.actor_micro_rows) == (6, 7, 4)


@pytest.mark.parametrize(
    ("argv", "reference", "in_reward"),
    [
        ([], False, False),
        (["algorithm.kl_ctrl.kl_coef=0.1"], True, True),
        (["algorithm.kl_ctrl.kl_coef=0.1", "algorithm.use_kl_in_reward=false"], False, False),
        (["algorithm.use_kl_in_reward=true"], True, True),
        ([f"{ACTOR}use_kl_loss=true"], True, False),
    ],
)
def test_who_needs_the_reference(argv, reference, in_reward):
    result = plan(*argv)
    assert (result.use_reference, result.use_kl_in_reward) == (reference, in_reward)


def test_only_estimators_that_read_values_have_a_critic():
    assert plan().use_critic
    grpo = plan("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")
    assert not grpo.use_critic and "critic" not in grpo.describe(PPOConfig(), "cpu")


def test_the_description_has_the_numbers():
    config, _ = load_config(
        PPOConfig, [MICRO, "trainer.n_gpus_per_node=2", "trainer.nnodes=2", "actor_rollout_ref.rollout.n=3"]
    )
    text = make_plan(config, 600).describe(config, "cpu")
    assert "4 rank(s) on the ray backend, each with actor, critic, rollout" in text
    assert "2 steps (2 an epoch): 256 prompts x 3 = 768 sequences a step, 192 a rank" in text
    assert "mini-batch 768 sequences (192 a rank, micro-batch 4), 2 optimizer steps in all" in text


def test_the_description_says_what_rests_on_the_host():
    keys = [f"{ACTOR}fsdp_config.param_offload=true", f"{ACTOR}fsdp_config.optimizer_offload=true"]
    config, _ = load_config(PPOConfig, [MICRO, *keys, "critic.fsdp_config.optimizer_offload=true"])
    plan = make_plan(config, 600)
    text = plan.describe(config, "cuda")
    assert "plan  actor: parameters and optimizer state in host memory between its phases\n" in text
    assert text.endswith("plan  critic: optimizer state in host memory between its phases")
    assert plan.describe(config, "cpu").endswith("between its phases, which saves nothing on a CPU")


@given(
    mini=st.integers(1, 6),
    minis=st.integers(1, 4),
    n=st.integers(1, 4),
    ranks=st.integers(1, 4),
    epochs=st.integers(1, 3),
    rows=st.integers(1, 60),
)
def test_what_divides_adds_up_and_what_does_not_is_refused(mini, minis, n, ranks, epochs, rows):
    config = PPOConfig()
    actor, batch = config.actor_rollout_ref.actor, mini * minis
    config.data.train_batch_size, config.trainer.n_gpus_per_node, config.trainer.total_epochs = batch, ranks, 2
    actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu, actor.ppo_epochs = mini, 2, epochs
    config.actor_rollout_ref.rollout.n = n
    if rows < batch:
        with pytest.raises(UserError, match=f"data.train_batch_size={batch}, but data.train_files has {rows} rows"):
            make_plan(config, rows)
    elif mini * n % ranks:
        with pytest.raises(UserError, match=f"{mini} / {ranks}|{mini * n} / {ranks} = {mini * n / ranks:.2f}"):
            make_plan(config, rows)
    else:
        result = make_plan(config, rows)
        assert result.rows == batch * n and result.rows % result.actor_mini_rows == 0
        assert result.actor_mini_rows % ranks == 0 and result.rows % ranks == 0
        assert result.total_steps == rows // batch * 2
        assert result.actor_updates == result.critic_updates == result.total_steps * epochs * minis


REFUSED = {
    "mini-batch": ([f"{ACTOR}ppo_mini_batch_size=100"], "ppo_mini_batch_size=100 .*256 / 100 = 2.56"),
    "larger mini-batch": ([f"{ACTOR}ppo_mini_batch_size=512"], "256 / 512 = 0.50"),
    "critic's mini-batch": (["critic.ppo_mini_batch_size=100"], "^critic.ppo_mini_batch_size=100"),
    "ranks": (["trainer.n_gpus_per_node=3"], "256 / 3 = 85.33"),
    "rows": (["data.train_batch_size=1001"], "data.train_batch_size=1001, but data.train_files has 1000 rows"),
    "group of one": (["algorithm.adv_estimator=rloo"], "rollout.n=1"),
    "no micro-batch": ([f"{ACTOR}ppo_micro_batch_size_per_gpu=null"], "ppo_micro_batch_size_per_gpu is not set"),
    "estimator": (["algorithm.adv_estimator=gea"], "algorithm.adv_estimator.*did you mean 'gae'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    argv, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        plan(*argv)
