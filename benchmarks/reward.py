"""Scoring answers to gsm8k-style questions with math-verify: the pool of processes beside a bare loop.

    python benchmarks/reward.py [--rows 4096] [--rounds 3] [--trivial 256]

Both call the built-in reward ``math`` on the same answers, and must give the same scores. The pool's time is that of a
step in the middle of a run: its processes are there. The two are measured in turn, so that other work on the machine
hits both.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import psutil

from podium.workers.reward.call import call_row
from podium.workers.reward.functions import RewardSource
from podium.workers.reward.outcome import Outcome, ScoreRequest
from podium.workers.reward.pool import ProcessPool, default_num_processes
from podium.workers.reward.process_main import Job

_STEPS = "First, {a} apples and {b} more make {c}. " * 12


def answers(rows: int) -> list[ScoreRequest]:
    """Worked answers of about 500 characters; five in eight are right, in several notations, one has no box."""
    requests = []
    for i in range(rows):
        truth = 3 * i + 7
        endings = [
            f"\\boxed{{{truth}}}",
            f"\\boxed{{{truth:,}}}",
            f"\\boxed{{{truth}.0}}",
            f"\\boxed{{\\frac{{{2 * truth}}}{{2}}}}",
            f"\\boxed{{\\${truth}}}",
            f"\\boxed{{{truth + 1}}}",
            f"\\boxed{{\\frac{{{truth}}}{{3}}}}",
            f"{truth}",
        ]
        text = _STEPS.format(a=i, b=2 * i + 7, c=truth) + "So it is " + endings[i % 8]
        requests.append(ScoreRequest("math", text, str(truth), {"index": i}))
    return requests


def cpu_seconds() -> float:
    """Of this process and those below it."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children()))


def timed(score: Any, requests: list[ScoreRequest]) -> tuple[float, float, list[Outcome]]:
    """Seconds, CPU seconds, and the outcomes."""
    began, cpu = time.perf_counter(), cpu_seconds()
    outcomes = score(requests)
    return time.perf_counter() - began, cpu_seconds() - cpu, outcomes


def compare(source: RewardSource, requests: list[ScoreRequest], rounds: int) -> list[float]:
    """Best seconds of a bare loop and of the pool, and best CPU seconds of each.

    Raises:
        SystemExit: they do not agree.
    """
    fn = source.load()
    pool = ProcessPool(Job(source, "row", 60.0, 0), default_num_processes(), 4096, 1)
    try:
        pool.run(requests)  # starts the processes
        times = []
        for _ in range(rounds):
            bare, bare_cpu, expected = timed(lambda batch: [call_row(fn, request) for request in batch], requests)
            pooled, pooled_cpu, got = timed(pool.run, requests)
            for request, outcome, other in zip(requests, expected, got, strict=True):
                if outcome != other:
                    raise SystemExit(f"error: {request.solution_str!r}: the loop gives {outcome}, the pool {other}")
            times.append((bare, pooled, bare_cpu, pooled_cpu))
    finally:
        pool.close()
    return [min(column) for column in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trivial", type=int, default=256, help="rows of the quickstart's reward")
    args = parser.parse_args()
    print("| Reward | rows | processes | loop s | pool s | faster | loop CPU s | pool CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    for label, source, requests in (
        ("math (math-verify)", RewardSource(name="math"), answers(args.rows)),
        ("quickstart", RewardSource("examples/quickstart/reward.py"), answers(args.trivial)),
    ):
        bare, pooled, bare_cpu, pooled_cpu = compare(source, requests, args.rounds)
        cells = [f"{bare:.4f}", f"{pooled:.4f}", f"{bare / pooled:.2f}x", f"{bare_cpu:.3f}", f"{pooled_cpu:.3f}"]
        print("| " + " | ".join([label, str(len(requests)), str(default_num_processes()), *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
