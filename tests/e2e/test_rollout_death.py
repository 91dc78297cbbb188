"""A rollout in processes of its own that is killed or stopped: the step goes on with the same numbers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from podium.trainer.blame import STACKS
from tests.e2e.commands import PPO, Preloaded, metrics
from tests.e2e.test_resume import finished, weights
from tests.small_task import SmallTask

ROLLOUT = "actor_rollout_ref__rollout__"
COMMON: dict[str, Any] = {"trainer__total_training_steps": 4}
VERSIONS = ("weight_sync/version", "training/weight_version")
ALONE: dict[str, dict[str, Any]] = {
    "device": {f"{ROLLOUT}placement": "device"},
    "apart": {f"{ROLLOUT}placement": "apart", f"{ROLLOUT}n_gpus_per_node": 1},
}


def hit(run_dir: Path, during: str, step: int, number: int, done: threading.Event) -> None:
    """Sends a signal to the rollout's process, once, while it is `during` a call of a step."""
    while not done.is_set():
        time.sleep(0.001)
        with contextlib.suppress(OSError, ValueError):
            if len((run_dir / "metrics.jsonl").read_text().splitlines()) < step:
                continue
            for file in (run_dir / STACKS).glob("*.doing"):
                text = file.read_text()
                if " rollout rank 0" in text and during in text:
                    os.kill(int(file.stem.rsplit("_", 1)[1]), number)
                    done.set()


def disturbed(command: Preloaded, argv: list[str], run_dir: Path, during: str, number: int = signal.SIGKILL) -> str:
    """A run whose rollout was hit in step 2; what it said."""
    done = threading.Event()
    thread = threading.Thread(target=hit, args=(run_dir, during, 2, number, done))
    thread.start()
    try:
        result = command(PPO, argv, timeout_s=500)
    finally:
        was_hit = done.is_set()
        done.set()
        thread.join()
    assert was_hit, str(result)
    finished(result)
    assert "rollout: started anew (1 of at most 3 times)" in result.err, str(result)
    return result.err


def same_but_for_the_version(straight: Path, run_dir: Path) -> None:
    """A rollout that is fed again gets a version more."""

    def computed(folder: Path) -> list[dict[str, Any]]:
        return [
            {
                name: value
                for name, value in row.items()
                if not name.startswith(("timing_s/", "perf/")) and name not in VERSIONS
            }
            for row in metrics(folder)
        ]

    assert computed(straight) == computed(run_dir)
    assert weights(straight) == weights(run_dir)
    assert metrics(run_dir)[-1]["weight_sync/version"] == metrics(straight)[-1]["weight_sync/version"] + 1
    assert metrics(run_dir)[-1]["perf/rollout_restarts"] == 1
    assert {"perf/memory/rollout/generate/peak_rss_gb", "perf/memory/actor/update/peak_rss_gb"} <= metrics(run_dir)[
        -1
    ].keys()


@pytest.mark.parametrize(
    ("placement", "backend", "engine", "during"),
    [
        ("device", "local", "hf", "_sequences"),
        pytest.param("device", "local", "hf", "in rollout.sync_weights", marks=pytest.mark.slow),
        pytest.param("device", "local", "hf", "waiting for a call", marks=pytest.mark.slow),
        pytest.param("apart", "local", "hf", "in rollout.sync_weights", marks=pytest.mark.slow),
        pytest.param("apart", "ray", "hf", "_sequences", marks=pytest.mark.slow),
        pytest.param("device", "local", "vllm", "_sequences", marks=pytest.mark.slow),
        pytest.param("device", "ray", "vllm", "_sequences", marks=pytest.mark.slow),
    ],
)
def test_a_rollout_that_dies_is_started_anew_within_the_step(
    command: Preloaded, task: SmallTask, tmp_path: Path, placement: str, backend: str, engine: str, during: str
):
    changes = COMMON | ALONE[placement] | {"trainer__backend": backend, f"{ROLLOUT}name": engine}
    straight, run_dir = tmp_path / "straight", tmp_path / "hit"
    finished(command(PPO, task.ppo(straight, **changes), timeout_s=400))
    said = disturbed(command, task.ppo(run_dir, **changes), run_dir, during)
    assert "Traceback" not in said
    same_but_for_the_version(straight, run_dir)


@pytest.mark.slow
def test_a_rollout_that_does_not_answer_is_started_anew(command: Preloaded, task: SmallTask, tmp_path: Path):
    changes = COMMON | ALONE["device"] | {"trainer__deadlines__generate_s": 20}
    straight, run_dir = tmp_path / "straight", tmp_path / "hit"
    finished(command(PPO, task.ppo(straight, **changes)))
    argv = task.ppo(run_dir, **changes)
    said = disturbed(command, argv, run_dir, "_sequences", signal.SIGSTOP)
    assert "sequences did not finish within 20 s; no answer yet from rank(s) 0 (phase generate; " in said
    assert "raise trainer.deadlines.generate_s" in said
    assert "rollout rank 0" in (run_dir / "blame.txt").read_text()
    same_but_for_the_version(straight, run_dir)
