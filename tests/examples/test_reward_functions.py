"""The examples of reward functions, in the processes in which they would run."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from podium.trainer.config.reward import RewardFunctionConfig, RewardModelConfig
from podium.workers.reward.build import build_scorer
from podium.workers.reward.outcome import ScoreRequest


def score(texts, file, kwargs=None, **model):
    function = RewardFunctionConfig(path=f"examples/reward_functions/{file}", reward_kwargs=kwargs or {})
    scorer = build_scorer(RewardModelConfig(num_workers=1, **model), function)
    outcomes = scorer([ScoreRequest("source", text, "12", {}) for text in texts])
    scorer.close()
    return outcomes


@pytest.fixture
def judge():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            reply = "I am not sure." if "hm" in asked else "Fine. Rating: 8"
            body = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    server.shutdown()
    server.server_close()


def test_a_judge_rates_or_abstains(judge):
    outcomes = score(["12", "hm"], "async_judge.py", {"url": judge, "model": "m"})
    assert [outcome.score for outcome in outcomes] == [0.8, None] and outcomes[1].kind == "abstain"


def test_novelty_is_of_the_batch():
    outcomes = score(["12", "so 12", "12", "1"], "batch_novelty.py", reward_manager="batch")
    assert [outcome.score for outcome in outcomes] == [1.1, 1.2, 1.1, 0.0]
