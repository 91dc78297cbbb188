"""Keys that a mode would ignore, and modes that do not fit together."""

import pytest

from podium.trainer.config import PPOConfig, SFTConfig, check_config, check_sft_config, load_config
from podium.utils.errors import UserError

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
VAL = "data.val_files=v.parquet"


def check(*argv: str) -> None:
    check_config(*load_config(PPOConfig, list(argv)))


def test_defaults_pass():
    check()
    check_sft_config(*load_config(SFTConfig, []))


def test_training_needs_sampled_responses():
    with pytest.raises(UserError, match=f"{ROLLOUT}temperature=0.0.*above 0"):
        check(f"{ROLLOUT}temperature=0")


@pytest.mark.parametrize("key", ["test_freq", "save_freq"])
def test_validation_and_checkpoints_wait_for_a_sync(key: str):
    check(VAL, f"trainer.{key}=4", f"{ROLLOUT}weight_sync.frequency=2")
    with pytest.raises(UserError, match=rf"trainer\.{key}=3: expected a multiple of {ROLLOUT}weight_sync.frequency=2"):
        check(VAL, f"trainer.{key}=3", f"{ROLLOUT}weight_sync.frequency=2")


GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}n=4"]
REMOTE = ["reward_model.reward_manager=remote", "reward_model.url=http://host/score"]
IGNORED = {
    "a critic without GAE": ([*GRPO, "critic.model.path=x"], "critic.model.path"),
    "the reference without a KL": (["actor_rollout_ref.ref.fsdp_config.dtype=bfloat16"], "actor_rollout_ref.ref"),
    "the KL loss's kind without it": ([f"{ACTOR}kl_loss_type=mse"], f"{ACTOR}kl_loss_type"),
    "the KL's kind without a KL": (["algorithm.kl_penalty=abs"], "algorithm.kl_penalty"),
    "the controller without a KL": (["algorithm.kl_ctrl.type=adaptive"], "algorithm.kl_ctrl.type"),
    "the coefficient where it is off": (
        ["algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef=0.1"],
        "algorithm.kl_ctrl.kl_coef",
    ),
    "the target of a fixed KL": (
        ["algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl.target_kl=1"],
        "algorithm.kl_ctrl.target_kl",
    ),
    "vLLM's memory without vLLM": (
        [f"{ROLLOUT}name=hf", f"{ROLLOUT}gpu_memory_utilization=0.3"],
        f"{ROLLOUT}gpu_memory_utilization",
    ),
    "arguments of no function": (["custom_reward_function.reward_kwargs.a=1"], "custom_reward_function.reward_kwargs"),
    "a server's address without a server": (["reward_model.url=http://h"], "reward_model.url"),
    "processes of a server": ([*REMOTE, "reward_model.num_workers=2"], "reward_model.num_workers"),
    "a function beside a server": ([*REMOTE, "custom_reward_function.path=a.py"], "custom_reward_function.path"),
    "one function beside several": (
        ["custom_reward_function.path=a.py", "custom_reward_function.sources.b.path=b.py"],
        "custom_reward_function.path",
    ),
    "attempts of a batch": (
        ["custom_reward_function.path=a.py", "reward_model.reward_manager=batch", "reward_model.max_retries=1"],
        "reward_model.max_retries",
    ),
    "the order's seed without shuffling": (["data.shuffle=false", "data.seed=3"], "data.seed"),
    "a share beside a number of steps": (
        [f"{ACTOR}optim.lr_warmup_steps=3", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"],
        f"{ACTOR}optim.lr_warmup_steps_ratio",
    ),
    "the end of a decay without decay": (["critic.optim.min_lr_ratio=0.1"], "critic.optim.min_lr_ratio"),
    "top-p of greedy validation": ([VAL, f"{ROLLOUT}val_kwargs.top_p=0.9"], f"{ROLLOUT}val_kwargs.top_p"),
    "validation's sampling without validation": ([f"{ROLLOUT}val_kwargs.n=4"], f"{ROLLOUT}val_kwargs.n"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_a_key_without_effect_is_refused(case):
    argv, key = IGNORED[case]
    with pytest.raises(UserError, match=rf"^{key}.* has no effect .*: remove it$"):
        check(*argv)


EFFECTIVE = {
    "a built-in reward by name": [
        "custom_reward_function.name=gsm8k",
        "custom_reward_function.reward_kwargs.method=strict",
    ],
    "a server": REMOTE,
    "the penalty for length": [
        f"reward_model.{key}" for key in ("reward_manager=dapo", "overlong_buffer.enable=true", "overlong_buffer.len=9")
    ],
    "the reference for the KL in the reward": [
        "algorithm.kl_ctrl.kl_coef=0.1",
        "actor_rollout_ref.ref.fsdp_config.dtype=bfloat16",
    ],
    "the reference for the KL in the loss": [f"{ACTOR}use_kl_loss=true", f"{ACTOR}kl_loss_type=k3+"],
    "a coefficient of 0, as scripts pass it": ["algorithm.kl_ctrl.kl_coef=0"],
    "a measured KL": ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3"],
    "an adaptive KL": [
        f"algorithm.kl_ctrl.{key}" for key in ("kl_coef=0.1", "type=adaptive", "target_kl=1", "horizon=9")
    ],
    "no reward file, as by default": ["custom_reward_function.path=null"],
    "several sampled validations": [VAL, f"{ROLLOUT}val_kwargs.n=4", f"{ROLLOUT}val_kwargs.temperature=1"],
    "decay": [f"{ACTOR}optim.lr_scheduler_type=cosine", f"{ACTOR}optim.min_lr_ratio=0.1"],
    "vLLM's memory": [f"{ROLLOUT}gpu_memory_utilization=0.3"],
}


def test_the_same_greedy_answer_several_times_is_refused():
    with pytest.raises(UserError, match=r"val_kwargs\.n=4: greedy validation gives one answer each time"):
        check(VAL, f"{ROLLOUT}val_kwargs.n=4")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["reward_model.reward_manager=remote"], "reward_model.url=None: .* needs an http"),
        (["reward_model.reward_manager=batch"], "batch needs custom_reward_function.path"),
        (["reward_model.reward_manager=dapo"], "overlong_buffer.enable=true"),
    ],
)
def test_a_manager_without_what_it_needs_is_refused(argv, message):
    with pytest.raises(UserError, match=message):
        check(*argv)


@pytest.mark.parametrize("case", EFFECTIVE)
def test_a_key_with_effect_passes(case):
    check(*EFFECTIVE[case])


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["data.shuffle=false", "data.seed=3"], "data.seed"),
        (["trainer.test_freq=3"], "trainer.test_freq"),
        (["optim.min_lr_ratio=0.1"], "optim.min_lr_ratio"),
    ],
)
def test_sft_refuses_keys_without_effect_too(argv, key):
    with pytest.raises(UserError, match=f"^{key} has no effect"):
        check_sft_config(*load_config(SFTConfig, argv))
