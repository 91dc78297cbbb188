"""A real server on loopback, and what real servers do wrong."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from podium.workers.reward.outcome import ScoreRequest
from podium.workers.reward.pool import ProcessPool
from podium.workers.reward.process_main import Job
from podium.workers.reward.remote import RemoteSource


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def score(url, requests, *, limit_s=20.0, retries=0, rate_limit=None, concurrency=64):
    pool = ProcessPool(Job(RemoteSource(url, rate_limit), "row", limit_s, retries), 1, 512, concurrency)
    try:
        return pool.run(requests)
    finally:
        pool.close()


def request(**info):
    return ScoreRequest("source", "12", "12", info)


def test_the_reference_server_scores(tmp_path):
    port = free_port()
    reward = "examples/quickstart/reward.py"
    server = subprocess.Popen(
        [sys.executable, "examples/reward_server/server.py", "--path", reward, "--port", str(port)]
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        right, wrong = ScoreRequest("a", "12", "12", {"i": 1}), ScoreRequest("a", "21", "12", {})
        outcomes = score(f"http://127.0.0.1:{port}/score", [right, wrong] * 20)
        assert [outcome.score for outcome in outcomes] == [1.0, 0.0] * 20
        bad = ScoreRequest(7, "12", "12", {})  # the server says what it does not understand
        [outcome] = score(f"http://127.0.0.1:{port}/score", [bad], retries=3)
        assert outcome.kind == "error" and "answered 422" in outcome.reason
    finally:
        server.terminate()
        server.wait()


class Handler(BaseHTTPRequestHandler):
    """Does what ``extra_info`` says."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[dict] = {}

    def do_POST(self):
        info = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["extra_info"]
        do = info.get("do", "score")
        count = Handler.seen[info.get("id")] = Handler.seen.get(info.get("id"), 0) + 1
        if do == "slow":
            time.sleep(info["s"])
        status = {"500": 500, "429 twice": 429 if count < 3 else 200}.get(do, 200)
        body = {"garbage": b"<html>\nno</html>", "object": b'{"score": 0.5, "acc": true}', "nothing": b"{}"}.get(
            do, b"1.0"
        )
        if do == "hang up":
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


MISDEEDS = {
    "slow": ("timeout", r"no result in 2 s"),
    "500": ("error", r"answered 500: 1.0"),
    "garbage": ("error", r"answered what is no JSON: <html> no</html>"),
    "nothing": ("error", r"a dict without 'score'"),
    "hang up": ("error", r"RemoteProtocolError"),
}


@pytest.mark.parametrize("deed", MISDEEDS)
def test_a_servers_misdeed_costs_its_own_sample_only(url, deed):
    around = [request(do="object")] * 10
    outcomes = score(url, [*around, request(do=deed, s=5), *around], limit_s=2.0, retries=1)
    kind, reason = MISDEEDS[deed]
    guilty = outcomes.pop(10)
    assert guilty.kind == kind and re.search(reason, guilty.reason), guilty
    assert all(outcome.score == 0.5 and outcome.extra == {"acc": True} for outcome in outcomes)


def test_a_busy_server_is_asked_again(url):
    [outcome] = score(url, [request(do="429 twice", id="busy")], retries=2)
    assert outcome.score == 1.0 and Handler.seen["busy"] == 3


def test_a_server_that_is_down_is_an_error_with_its_address():
    address = f"http://127.0.0.1:{free_port()}/score"
    outcomes = score(address, [request()] * 3, retries=1)
    assert [outcome.kind for outcome in outcomes] == ["error"] * 3
    assert address in outcomes[0].reason and "ConnectError" in outcomes[0].reason


def test_requests_are_paced_and_a_wait_for_a_turn_is_nobodys_time(url):
    began = time.monotonic()
    outcomes = score(url, [request()] * 31, rate_limit=10.0, limit_s=2.0)
    assert [outcome.score for outcome in outcomes] == [1.0] * 31
    assert time.monotonic() - began >= 30 / 10


def test_requests_overlap_within_the_limit(url):
    began = time.monotonic()
    outcomes = score(url, [request(do="slow", s=0.3)] * 16, concurrency=8)
    assert [outcome.score for outcome in outcomes] == [1.0] * 16
    assert 0.6 <= time.monotonic() - began < 16 * 0.3
