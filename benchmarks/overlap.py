"""A step's generation and scoring, one after the other and overlapped: the same batch, in turn.

    python benchmarks/overlap.py [--rows 64] [--seconds 0.05] [--rounds 5] [--engine hf]

The policy is the quickstart's untrained model, whose responses of up to 112 tokens end at random; the reward sleeps for
`--seconds` a response, as one that runs code or asks a server does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch

from podium.trainer.config import PPOConfig, load_config
from podium.trainer.launch import worker_groups
from podium.trainer.ppo.plan import make_plan
from podium.trainer.ppo.roles import build_roles
from podium.trainer.ppo.scoring import Scoring
from podium.trainer.ppo.source import SyncSource
from podium.trainer.ppo.streaming import steps_at_once
from podium.utils.dataset import EpochLoader, PromptDataset
from podium.utils.timing import PhaseTimer
from podium.utils.tokenizer import load_tokenizer
from podium.workers.reward.build import build_scorer
from podium.workers.reward.manager import RewardManager
from tests.small_task import make_small_task

_LENGTH = 112
_REWARD = """
import time
def compute_score(solution_str, seconds, **_):
    time.sleep(seconds)
    return float(len(solution_str))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="hf")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    """Prints seconds of each round, and of the fastest."""
    task = make_small_task(folder)
    (folder / "reward.py").write_text(_REWARD)
    changes = {
        "data__max_response_length": _LENGTH,
        "data__train_batch_size": args.rows,
        "actor_rollout_ref__rollout__name": args.engine,
        "actor_rollout_ref__rollout__max_num_seqs": args.rows,
        "custom_reward_function__path": folder / "reward.py",
        "custom_reward_function__reward_kwargs__seconds": args.seconds,
    }
    config, _ = load_config(PPOConfig, task.ppo(folder / "run", **changes))
    tokenizer = load_tokenizer(str(task.model))
    train = PromptDataset(str(task.train), tokenizer, max_prompt_length=7)
    reward = RewardManager(build_scorer(config.reward_model, config.custom_reward_function), tokenizer)
    role = {"rollout": build_roles(config, make_plan(config, len(train)), tokenizer)["rollout"]}
    with closing(reward), worker_groups(config.trainer, "cpu", role, "overlap") as groups:
        groups["rollout"].init_model()
        groups["rollout"].load_own_weights()

        def source(steps: int | None) -> SyncSource:
            return SyncSource(
                train,
                EpochLoader(len(train), args.rows, seed=1),
                groups["rollout"],
                Scoring(reward, config.reward_model.overlong_buffer, _LENGTH),
                PhaseTimer(),
                n=1,
                sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
                seed=0,
                pad_token_id=tokenizer.pad_token_id,
                max_prompt_length=7,
                steps_at_once=steps,
            )

        ways = {"apart": source(None), "overlapped": source(steps_at_once(_LENGTH))}
        best = dict.fromkeys(ways, float("inf"))
        for number in range(args.rounds):
            batches = []
            for name, way in ways.items():
                began = time.perf_counter()
                batches.append(next(way))
                seconds = time.perf_counter() - began
                best[name] = min(best[name], seconds)
                print(f"round {number}  {name:<10} {seconds:.2f} s", flush=True)
            one, two = (batch.batch for batch in batches)
            assert one is not None and two is not None and all(torch.equal(one[name], two[name]) for name in one.keys())  # noqa: SIM118
        print(f"fastest: apart {best['apart']:.2f} s, overlapped {best['overlapped']:.2f} s")


if __name__ == "__main__":
    main()
