"""The quickstart's task made small, with a reward that an untrained model can raise: digits."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in a response of six characters."""
    return min(6, sum(c.isdigit() for c in solution_str)) / 6
'''


@dataclass(frozen=True)
class SmallTask:
    """Paths of a made task."""

    train: Path
    val: Path
    sft_train: Path
    sft_val: Path
    model: Path
    reward: Path

    def ppo(self, run_dir: Path, **changes: Any) -> list[str]:
        """Arguments of main_ppo for a run of seconds; `changes` are keys with ``__`` for the dot, None to leave out."""
        keys = {
            "data__train_files": self.train,
            "data__val_files": self.val,
            "data__train_batch_size": 16,
            "data__max_prompt_length": 7,
            "data__max_response_length": 7,
            "actor_rollout_ref__model__path": self.model,
            "actor_rollout_ref__actor__optim__lr": 1e-3,
            "actor_rollout_ref__actor__ppo_mini_batch_size": 16,
            "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 16,
            "actor_rollout_ref__rollout__name": "hf",
            "custom_reward_function__path": self.reward,
            "trainer__total_training_steps": 3,
            "trainer__backend": "local",
            "trainer__device": "cpu",
            "trainer__default_local_dir": run_dir,
        }
        return _arguments(keys | changes)

    def sft(self, run_dir: Path, **changes: Any) -> list[str]:
        """Arguments of main_sft, likewise."""
        keys = {
            "data__train_files": self.sft_train,
            "data__val_files": self.sft_val,
            "data__train_batch_size": 32,
            "data__max_prompt_length": 7,
            "data__max_response_length": 7,
            "model__path": self.model,
            "optim__lr": 1e-3,
            "trainer__backend": "local",
            "trainer__device": "cpu",
            "trainer__default_local_dir": run_dir,
        }
        return _arguments(keys | changes)


def _arguments(keys: dict[str, Any]) -> list[str]:
    return [f"{key.replace('__', '.')}={value}" for key, value in keys.items() if value is not None]


def make_small_task(out: Path) -> SmallTask:
    """Makes the task under `out`."""
    file = Path(__file__).parents[1] / "examples" / "quickstart" / "make_task.py"
    spec = importlib.util.spec_from_file_location("quickstart_make_task", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    paths = module.make_task(out, seed=0, train_size=256, val_size=24, sft_size=128, sft_val_size=20)
    reward = out / "digits.py"
    reward.write_text(REWARD)
    return SmallTask(**paths, reward=reward)


def save_random_reward_model(task: SmallTask, path: Path) -> Path:
    """Saves one in the policy's vocabulary; returns where."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(task.model, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(task.model).save_pretrained(path)
    return path
