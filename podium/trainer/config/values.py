"""Values that no mode accepts: names outside their choices, numbers outside their range."""

import math
from dataclasses import dataclass
from typing import Any

from podium.trainer.config.load import walk
from podium.utils.errors import UserError

_PRECISIONS = ("float32", "bfloat16")

# By the end of a key: a leaf means the same wherever it stands.
_CHOICES = {
    "rollout.name": ("vllm", "hf"),
    "rollout.placement": ("process", "device", "apart"),
    "weight_sync.verify": ("off", "sample", "full"),
    "reward_model.normalize": ("none", "batch"),
    "reward_model.style": ("discriminative", "generative"),
    "kl_ctrl.type": ("fixed", "adaptive"),
    "strategy": ("fsdp", "megatron"),
    "model_dtype": _PRECISIONS,
    "dtype": _PRECISIONS,
    "lr_scheduler_type": ("constant", "cosine", "linear"),
    "truncation": ("error", "left", "right", "middle"),
    "reward_manager": ("naive", "batch", "dapo", "remote"),
    "device": ("auto", "cpu", "cuda"),
    "backend": ("ray", "local"),
    "resume_mode": ("auto", "disable", "resume_path"),
    "best_ckpt_mode": ("max", "min"),
    "invariants": ("warn", "stop"),
}


@dataclass(frozen=True)
class _Range:
    low: float
    high: float = math.inf
    low_is_in: bool = True

    def has(self, value: float) -> bool:
        # A NaN is in no range.
        return (self.low <= value if self.low_is_in else self.low < value) and value <= self.high

    def __str__(self) -> str:
        text = f"at least {self.low:g}" if self.low_is_in else f"above {self.low:g}"
        return text if self.high == math.inf else f"{text} and at most {self.high:g}"


_AT_LEAST_1, _AT_LEAST_0, _ABOVE_0 = _Range(1), _Range(0), _Range(0, low_is_in=False)
_SHARE, _POSITIVE_SHARE = _Range(0, 1), _Range(0, 1, low_is_in=False)

_RANGES = {
    "train_batch_size": _AT_LEAST_1,
    "val_batch_size": _AT_LEAST_1,
    "data.max_length": _Range(2),
    "lora_rank": _AT_LEAST_0,
    "lora_alpha": _AT_LEAST_1,
    "filter_overlong_prompts_workers": _AT_LEAST_1,
    "max_prompt_length": _AT_LEAST_1,
    "max_response_length": _AT_LEAST_1,
    "ppo_mini_batch_size": _AT_LEAST_1,
    "ppo_micro_batch_size_per_gpu": _AT_LEAST_1,
    "log_prob_micro_batch_size_per_gpu": _AT_LEAST_1,
    "micro_batch_size_per_gpu": _AT_LEAST_1,
    "ppo_epochs": _AT_LEAST_1,
    "max_num_seqs": _AT_LEAST_1,
    "bucket_megabytes": _AT_LEAST_1,
    "rollout.nnodes": _AT_LEAST_1,
    "rollout.n_gpus_per_node": _AT_LEAST_1,
    "weight_sync.timeout_s": _ABOVE_0,
    "tensor_model_parallel_size": _AT_LEAST_1,
    "pipeline_model_parallel_size": _AT_LEAST_1,
    "virtual_pipeline_model_parallel_size": _Range(2),
    "context_parallel_size": _AT_LEAST_1,
    "expert_model_parallel_size": _AT_LEAST_1,
    "weight_sync.frequency": _AT_LEAST_1,
    "rollout.n": _AT_LEAST_1,
    "val_kwargs.n": _AT_LEAST_1,
    "total_epochs": _AT_LEAST_1,
    "total_training_steps": _AT_LEAST_1,
    "nnodes": _AT_LEAST_1,
    "n_gpus_per_node": _AT_LEAST_1,
    "log_freq": _AT_LEAST_1,
    "seed": _AT_LEAST_0,
    "critic_warmup": _AT_LEAST_0,
    "log_val_generations": _AT_LEAST_0,
    "test_freq": _Range(-1),
    "save_freq": _Range(-1),
    "record_freq": _Range(-1),
    "max_ckpt_to_keep": _AT_LEAST_1,
    "max_bad_steps": _AT_LEAST_1,
    "max_restarts": _AT_LEAST_0,
    "preempt_grace_s": _ABOVE_0,
    "lr": _AT_LEAST_0,
    "eps": _ABOVE_0,
    "weight_decay": _AT_LEAST_0,
    "lr_warmup_steps": _Range(-1),
    "lr_warmup_steps_ratio": _SHARE,
    "min_lr_ratio": _SHARE,
    "grad_clip": _ABOVE_0,
    "clip_ratio": _AT_LEAST_0,
    "clip_ratio_low": _AT_LEAST_0,
    "clip_ratio_high": _AT_LEAST_0,
    "clip_ratio_c": _Range(1, low_is_in=False),
    "cliprange_value": _AT_LEAST_0,
    "kl_coef": _AT_LEAST_0,
    "target_kl": _ABOVE_0,
    "horizon": _ABOVE_0,
    "gamma": _SHARE,
    "lam": _SHARE,
    "temperature": _AT_LEAST_0,
    "top_p": _POSITIVE_SHARE,
    "gpu_memory_utilization": _POSITIVE_SHARE,
    "rpc_timeout_s": _ABOVE_0,
    "deadlines.init_s": _ABOVE_0,
    "deadlines.generate_s": _ABOVE_0,
    "deadlines.score_s": _ABOVE_0,
    "deadlines.forward_s": _ABOVE_0,
    "deadlines.update_s": _ABOVE_0,
    "deadlines.save_s": _ABOVE_0,
    "rollout.max_restarts": _AT_LEAST_0,
    "batch_size": _AT_LEAST_1,
    "reward_model.num_workers": _AT_LEAST_1,
    "reward_model.timeout_s": _ABOVE_0,
    "reward_model.memory_limit_mb": _Range(64),
    "rate_limit": _ABOVE_0,
    "max_concurrency": _AT_LEAST_1,
    "max_retries": _AT_LEAST_0,
    "max_failure_rate": _SHARE,
}


def check_values(config: Any) -> None:
    """Checks every value of a configuration by itself.

    Raises:
        UserError: names the key, the value and what was expected.
    """
    for key, _, _, _ in walk(type(config)):
        value, leaf = value_of(config, key), key.rsplit(".", 1)[-1]
        choices = next((c for end, c in _CHOICES.items() if f".{key}".endswith(f".{end}")), None)
        if choices is not None and value not in choices:
            raise UserError(f"{key}={value}: expected {' or '.join(choices)}")
        allowed = next((r for end, r in _RANGES.items() if f".{key}".endswith(f".{end}")), None)
        if allowed is not None and value is not None and not allowed.has(value):
            raise UserError(f"{key}={value}: expected {allowed}")
        if leaf == "top_k" and value != -1 and value < 1:
            raise UserError(f"{key}={value}: expected at least 1, or -1 for the whole vocabulary")
        if leaf == "betas" and (len(value) != 2 or not all(0 <= beta < 1 for beta in value)):
            raise UserError(f"{key}={value}: expected two numbers, each at least 0 and below 1")
        if (leaf in ("train_files", "val_files") or key == "data.path") and not _are_files(value):
            raise UserError(f"{key}={value}: expected a file or a list of files")


def value_of(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _are_files(value: Any) -> bool:
    files = value if isinstance(value, list) else [value]
    return value is None or all(isinstance(file, str) for file in files)
