"""Runs whose reward function hangs, dies or fails on some responses."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.commands import Preloaded
from tests.e2e.test_bad_input import check
from tests.small_task import SmallTask

PPO = "podium.trainer.main_ppo"
GRPO = {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__rollout__n": 4}

REWARD = """
import os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, share=8):
    score = min(6, sum(c.isdigit() for c in solution_str)) / 6
    if solution_str == ground_truth:  # the trial at the start
        return score
    deed = sum(map(ord, solution_str)) % share
    if deed == 0:
        time.sleep(1000)
    if deed == 1:
        os.abort()
    if deed == 2:
        return {"score": float("nan")}
    print("scored", solution_str)
    return score
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "reward.py"
    file.write_text(text)
    return file


def steps(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_without_the_responses_that_have_no_score(command: Preloaded, task: SmallTask, tmp_path):
    run_dir = tmp_path / "run"
    reward = write(tmp_path, REWARD)
    result = command(
        PPO,
        task.ppo(
            run_dir,
            **GRPO,
            custom_reward_function__path=reward,
            custom_reward_function__reward_kwargs__share=24,
            reward_model__timeout_s=0.5,
            reward_model__max_failure_rate=0.6,
            trainer__total_training_steps=2,
        ),
    )
    assert result.code == 0 and not result.left, str(result)
    trained = [step for step in steps(run_dir) if "reward/failure_rate" in step]
    assert len(trained) == 2
    for step in trained:
        parts = [step[f"reward/{kind}_rate"] for kind in ("timeout", "error", "abstain")]
        assert 0 < step["reward/failure_rate"] == sum(parts) < 0.6
        assert step["critic/score/mean"] == step["reward/score/mean"]
    assert all(0 <= step["val/failure_rate"] < 1 for step in steps(run_dir) if "val/score/mean" in step)
    kept = [json.loads(line) for line in (run_dir / "reward_failures.jsonl").read_text().splitlines()]
    assert len(kept) >= sum(step["reward/failure_rate"] for step in trained) * 64
    assert {"timeout", "error"} == {sample["kind"] for sample in kept}
    assert any("SIGABRT" in sample["reason"] for sample in kept) and all("solution_str" in sample for sample in kept)
    assert result.out.count("first timeout, on sample") == 1 and result.out.count("first error, on sample") == 1
    assert "data row" in result.out and "in compute_score" in result.out  # where the late one was
    assert "printed:\nscored" in result.out


def test_beyond_the_limit_a_run_stops_with_the_samples_kept(command: Preloaded, task: SmallTask, tmp_path):
    run_dir = tmp_path / "run"
    argv = task.ppo(
        run_dir,
        custom_reward_function__path=write(tmp_path, REWARD),
        custom_reward_function__reward_kwargs__share=3,
        reward_model__timeout_s=0.3,
        reward_model__max_failure_rate=0.1,
    )
    check(command(PPO, argv), "gave no score for", "max_failure_rate=0.1", "sample", "data row", workers_started=True)
    assert (run_dir / "reward_failures.jsonl").read_text()


def test_a_function_that_hangs_on_the_first_row_is_told_before_anything_starts(command, task: SmallTask, tmp_path):
    reward = write(tmp_path, "import time\ndef compute_score(**_):\n    time.sleep(1000)\n")
    argv = task.ppo(tmp_path / "run", custom_reward_function__path=reward, reward_model__timeout_s=0.5)
    check(command(PPO, argv), "no result in 0.5 s", "train.parquet row 0", "compute_score")


class Moody(BaseHTTPRequestHandler):
    """Scores by the share of digits; some answers get 500, some are never answered, some get garbage."""

    def do_POST(self):
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = sample["solution_str"]
        mood = -1 if text == sample["ground_truth"] else sum(map(ord, text)) % 16
        if mood == 0:
            time.sleep(30)
        body = b"<html>" if mood == 1 else json.dumps({"score": sum(c.isdigit() for c in text) / 7}).encode()
        self.send_response(500 if mood == 2 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class MoodyServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def test_a_run_against_a_server_that_fails_at_times(command: Preloaded, task: SmallTask, tmp_path):
    server = MoodyServer(("127.0.0.1", 0), Moody)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    keys = {
        "custom_reward_function__path": None,
        "reward_model__reward_manager": "remote",
        "reward_model__url": f"http://127.0.0.1:{server.server_port}/",
        "reward_model__timeout_s": 4.0,
        "reward_model__max_retries": 1,
        "trainer__total_training_steps": 1,
    }
    argv = task.ppo(tmp_path / "run", **GRPO, **keys, reward_model__max_failure_rate=0.7)
    result = command(PPO, argv)
    server.shutdown()
    assert result.code == 0 and not result.left, str(result)
    [step] = [step for step in steps(tmp_path / "run") if "reward/failure_rate" in step]
    assert 0 < step["reward/failure_rate"] < 0.7
    kept = [json.loads(line) for line in (tmp_path / "run" / "reward_failures.jsonl").read_text().splitlines()]
    reasons = " ".join(sample["reason"] for sample in kept)
    assert "answered 500" in reasons or "no JSON" in reasons or "no result in 4 s" in reasons

    server.server_close()  # now it is down: told before anything starts
    check(command(PPO, task.ppo(tmp_path / "down", **GRPO, **keys)), f":{server.server_port}/", "ConnectError")
