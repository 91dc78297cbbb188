"""Choices and ranges of single values."""

import pytest

from podium.trainer.config import EvalConfig, GenerateConfig, PPOConfig, RMConfig, SFTConfig, load_config
from podium.trainer.config.load import walk
from podium.trainer.config.values import _CHOICES, _RANGES, check_values, value_of
from podium.utils.errors import UserError

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."


def check(cls: type, *argv: str) -> None:
    check_values(load_config(cls, list(argv))[0])


@pytest.mark.parametrize("cls", [PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig])
def test_defaults_pass(cls):
    check(cls)


def test_every_rule_is_about_a_key_that_exists():
    keys = [
        f".{key}" for cls in (PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig) for key, _, _, _ in walk(cls)
    ]
    for end in (*_CHOICES, *_RANGES):
        assert any(key.endswith(f".{end}") for key in keys), end


@pytest.mark.parametrize("cls", [PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig])
def test_every_number_with_a_range_refuses_a_nan(cls):
    for key, kind, _, _ in walk(cls):
        if kind is float and any(f".{key}".endswith(f".{end}") for end in _RANGES):
            with pytest.raises(UserError, match=f"{key}=nan: expected"):
                check(cls, f"{key}=nan")


REFUSED = {
    f"{ROLLOUT}name=sglang": "expected vllm or hf",
    f"{ROLLOUT}dtype=float16": "expected float32 or bfloat16",
    f"{ROLLOUT}weight_sync.verify=some": "expected off or sample or full",
    f"{ACTOR}fsdp_config.model_dtype=float8": "expected float32 or bfloat16",
    f"{ACTOR}strategy=deepspeed": "expected fsdp",
    "critic.optim.lr_scheduler_type=step": "expected constant or cosine or linear",
    "data.truncation=top": "expected error or left or right or middle",
    "trainer.device=gpu": "expected auto or cpu or cuda",
    "trainer.backend=slurm": "expected ray or local",
    "algorithm.kl_ctrl.type=adaptiv": "expected fixed or adaptive",
    "data.train_batch_size=0": "at least 1",
    "data.val_batch_size=-1": "at least 1",
    "data.max_response_length=0": "at least 1",
    "data.seed=-1": "at least 0",
    f"{ACTOR}ppo_epochs=0": "at least 1",
    f"{ACTOR}ppo_micro_batch_size_per_gpu=0": "at least 1",
    f"{ACTOR}clip_ratio=-0.1": "at least 0",
    f"{ACTOR}clip_ratio_c=1": "above 1",
    f"{ACTOR}grad_clip=0": "above 0",
    f"{ACTOR}optim.lr=-1": "at least 0",
    f"{ACTOR}optim.betas=[0.9]": "two numbers",
    f"{ACTOR}optim.betas=[0.9,1.0]": "below 1",
    f"{ACTOR}optim.lr_warmup_steps=-2": "at least -1",
    f"{ROLLOUT}n=0": "at least 1",
    f"{ROLLOUT}max_num_seqs=0": "at least 1",
    f"{ROLLOUT}top_p=0": "above 0 and at most 1",
    f"{ROLLOUT}top_p=1.5": "above 0 and at most 1",
    f"{ROLLOUT}top_k=0": "at least 1, or -1",
    f"{ROLLOUT}val_kwargs.temperature=-1": "at least 0",
    "algorithm.gamma=1.1": "at least 0 and at most 1",
    "trainer.total_training_steps=0": "at least 1",
    "trainer.total_epochs=0": "at least 1",
    "trainer.n_gpus_per_node=0": "at least 1",
    "trainer.seed=-1": "at least 0",
    "trainer.test_freq=-2": "at least -1",
    "trainer.rpc_timeout_s=0": "above 0",
    "data.train_files=5": "a file or a list of files",
    "data.val_files=[a.parquet,5]": "a file or a list of files",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text):
    key = text.split("=")[0]
    with pytest.raises(UserError, match=rf"^{key}=.*: .*{REFUSED[text]}"):
        check(PPOConfig, text)


@pytest.mark.parametrize("text", ["trainer.log_freq=0", "fsdp_config.dtype=half", "data.micro_batch_size_per_gpu=0"])
def test_what_sft_refuses(text):
    with pytest.raises(UserError, match=f"^{text}: expected"):
        check(SFTConfig, text)


def test_edges_pass():
    for text in (
        f"{ROLLOUT}top_p=1",
        f"{ROLLOUT}top_k=-1",
        "algorithm.lam=0",
        f"{ACTOR}clip_ratio_c=1.01",
        "data.seed=0",
    ):
        check(PPOConfig, text)
    check(PPOConfig, "data.train_files=[a.parquet,b.jsonl]", "data.val_files=null")


def test_value_of():
    assert value_of(PPOConfig(), "critic.optim.lr") == PPOConfig().critic.optim.lr
