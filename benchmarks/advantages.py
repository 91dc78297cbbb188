"""Advantage estimators, Podium against verl: seconds and peak memory on a 4096 x 4096 batch.

    python benchmarks/advantages.py --verl-python VENV/bin/python

Each measurement has a process of its own: CPU time of the best of ``--repeats`` calls on one thread, and how far the
first call raised the process's peak resident memory above that of the inputs. Both sides get the same tensors. Without
--verl-python only Podium is measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from beside import measure_apart

GROUP_SIZE = 8
ESTIMATORS = [
    "gae",
    "reinforce_plus_plus",
    "remax",
    "grpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "grpo_passk",
    "gdpo",
    "optimal_token_baseline",
]


def inputs(rows: int, width: int) -> dict[str, Any]:
    """Arguments of every estimator; nothing here is larger than what it returns."""
    import numpy as np
    import torch

    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=random)
    mask = torch.empty(rows, width, dtype=torch.int64)
    torch.lt(torch.arange(width), lengths, out=mask)
    rewards = torch.zeros(rows, width).mul_(1.0)  # written to, so that it has pages of its own, as a received batch has
    rewards[torch.arange(rows), lengths.squeeze(-1) - 1] = torch.randn(rows, generator=random)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": torch.randn(rows, width, generator=random),
        "old_log_probs": torch.randn(rows, width, generator=random).abs_().neg_(),
        "sum_pi_squared": torch.rand(rows, width, generator=random),
        "reward_baselines": torch.randn(rows, generator=random),
        "index": np.array([f"prompt-{row // GROUP_SIZE}" for row in range(rows)], dtype=object),
        "gamma": 0.99,
        "lam": 0.95,
    }


def measure(library: str, name: str, rows: int, width: int, repeats: int) -> dict[str, float]:
    """Runs one estimator in this process."""
    import inspect

    import torch

    torch.set_num_threads(1)
    function: Callable[..., Any]
    if library == "verl":
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    else:
        from podium.trainer.ppo.advantages import get_adv_estimator_fn
    function = get_adv_estimator_fn(name)
    given = inputs(rows, width)
    if library == "verl" and name in ("reinforce_plus_plus", "grpo_passk"):
        given["config"] = SimpleNamespace(gamma=given["gamma"], get=lambda key, default=None: default)
    accepted = inspect.signature(function).parameters
    arguments = {key: value for key, value in given.items() if key in accepted}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, peak = [], 0.0
    for _ in range(repeats):
        start = time.process_time()
        advantage, _ = function(**arguments)
        seconds.append(time.process_time() - start)
        peak = peak or (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        checksum = float(advantage.double().mul_(given["response_mask"]).square_().sum())
        del advantage, _
    return {"seconds": min(seconds), "peak_mib": peak, "checksum": checksum}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl-python", help="Python of an environment with verl")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", nargs=2, metavar=("LIBRARY", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        library, name = options.worker
        print(json.dumps(measure(library, name, options.rows, options.width, options.repeats)))
        return
    if not options.verl_python:
        print("verl is not measured: give --verl-python, the Python of an environment with verl 0.9.1")
    size = f"{options.rows} x {options.width}, groups of {GROUP_SIZE}"
    print(f"{size}, CPU seconds on one thread, best of {options.repeats}\n")
    print("| Estimator | Podium CPU s | verl CPU s | faster | Podium MiB | verl MiB | same values |")
    print("|---|---|---|---|---|---|---|")
    shape = ["--rows", str(options.rows), "--width", str(options.width), "--repeats", str(options.repeats)]
    for name in ESTIMATORS:
        ours = measure_apart(sys.executable, __file__, "podium", name, shape)
        row = [name, f"{ours['seconds']:.3f}", "", "", f"{ours['peak_mib']:.0f}", "", ""]
        if options.verl_python:
            theirs = measure_apart(options.verl_python, __file__, "verl", name, shape)
            same = abs(ours["checksum"] - theirs["checksum"]) <= 1e-3 * abs(theirs["checksum"])
            row[2:4] = [f"{theirs['seconds']:.3f}", f"{theirs['seconds'] / ours['seconds']:.1f}x"]
            row[5:7] = [f"{theirs['peak_mib']:.0f}", "yes" if same else "no"]
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
