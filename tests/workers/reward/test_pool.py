"""Real processes that do what reward functions do to them."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from podium.utils.errors import UserError
from podium.workers.reward.functions import RewardSource
from podium.workers.reward.outcome import Outcome, ScoreRequest
from podium.workers.reward.pool import ProcessPool
from podium.workers.reward.process_main import Job

MARK = uuid.uuid4().hex
MISBEHAVING = str(Path(__file__).with_name("misbehaving.py"))


def requests(*actions):
    """Each a name of `misbehaving.ACTIONS`, or the whole extra_info."""
    infos = [{"do": action} if isinstance(action, str) else action for action in actions]
    return [ScoreRequest("source", "12", "12", info) for info in infos]


def make_pool(path=MISBEHAVING, *, limit_s=30.0, processes=2, memory_limit_mb=512, concurrency=4, retries=0, **source):
    job = Job(RewardSource(path, **source), "row", limit_s, retries)
    return ProcessPool(job, processes, memory_limit_mb, concurrency)


@pytest.fixture(scope="module")
def impatient_pool():
    pool = make_pool(limit_s=1.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool():
    """Its limit is for machines that are busy."""
    pool = make_pool(limit_s=30.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def marked():
    """What is left is counted by this mark: other runs of these tests may be on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PODIUM_TEST_RUN", MARK)
        yield


def children():
    """Processes that a scorer has started and left, by id."""
    listing = subprocess.run(["ps", "-ewwo", "pid=,ppid=,stat=,args="], capture_output=True, text=True).stdout
    rows = [line.split(None, 3) for line in listing.splitlines()]
    return {int(pid): args for pid, _, state, args in rows if f"# {MARK}" in args and "Z" not in state}


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    assert condition()


def test_scores_come_back_in_order(pool):
    outcomes = pool.run(requests(*({"do": "score", "score": i} for i in range(500))))
    assert outcomes == [Outcome("score", score=float(i)) for i in range(500)]
    assert pool.run([]) == []


MISDEEDS = {
    "sleep_forever": ("timeout", "no result in 1 s", "misbehaving.py"),
    "hold_the_interpreter": ("timeout", "no result in 1 s", "hold_the_interpreter"),
    "fork_and_sleep": ("timeout", "no result in 1 s", "fork_and_sleep"),
    "exhaust_memory": ("error", "MemoryError", "exhaust_memory"),
    "exhaust_memory_bit_by_bit": ("error", "MemoryError", "bit_by_bit"),
    "segfault": ("error", "SIGSEGV", "in segfault"),
    "exit": ("error", "exit code 3", ""),
    "sys_exit": ("error", "SystemExit: 1", ""),
    "raise": ("error", "KeyError: 'no\\nsuch key'", "in raise_error"),
    "nan": ("error", "it returned nan", ""),
    "no_score": ("error", "a dict without 'score' (acc)", ""),
    "abstain": ("abstain", "nothing to compare with", ""),
    "unpicklable": ("error", "cannot be sent to the driver", ""),
    "local": ("error", "cannot be read by the driver", ""),
    "close_everything": ("error", "its process ended with exit code 1", ""),
}


@pytest.mark.parametrize("deed", MISDEEDS)
def test_a_misdeed_costs_its_own_sample_only(pool, impatient_pool, deed):
    kind, reason, traceback = MISDEEDS[deed]
    pool = impatient_pool if kind == "timeout" else pool
    before = children()
    around = [{"do": "score", "score": i} for i in range(40)]
    outcomes = pool.run(requests(*around[:20], deed, *around[20:]))
    guilty = outcomes.pop(20)
    assert [outcome.score for outcome in outcomes] == list(range(40))
    assert (guilty.kind, guilty.score) == (kind, None)
    assert reason in guilty.reason and "\n" not in guilty.reason
    assert traceback in guilty.traceback
    assert children() == before


@pytest.mark.parametrize(("deed", "score"), [("alarm", 0.5), ("fork_twins", 1.0), ("close_output", 1.0)])
def test_what_is_no_misdeed_is_scored(pool, deed, score):
    outcomes = pool.run(requests("score", deed, "score", deed, *["score"] * 20))
    assert [outcome.score for outcome in outcomes] == [1.0, score, 1.0, score] + [1.0] * 20


def test_an_alarm_left_behind_hits_nobody():
    pool = make_pool(processes=1, limit_s=30.0)
    outcomes = pool.run(requests("leave_an_alarm", {"do": "nap", "s": 0.3}, "score"))
    pool.close()
    assert [outcome.kind for outcome in outcomes] == ["score"] * 3


def test_children_left_behind_end_with_the_pool():
    before = children()
    pool = make_pool(processes=1)
    assert pool.run(requests("leave_children"))[0].score == 1.0
    wait_for(lambda: len(children()) == len(before) + 2)
    pool.close()
    assert children() == before


def test_a_gigabyte_of_output_is_taken_and_its_head_shown(capsys):
    pool = make_pool(limit_s=60.0, processes=1)
    outcomes = pool.run(requests("score", {"do": "print", "mib": 1024}, "score"))
    pool.close()
    assert [outcome.score for outcome in outcomes] == [1.0] * 3
    out = capsys.readouterr().out
    assert 2000 < len(out) < 2300 and f"and {(1 << 30) - 2000} bytes" in out


def test_late_ones_do_not_wait_for_each_other():
    pool = make_pool(limit_s=0.5)
    began = time.monotonic()
    outcomes = pool.run(requests(*["sleep_forever", "score"] * 4))
    seconds = time.monotonic() - began
    pool.close()
    assert [outcome.kind for outcome in outcomes] == ["timeout", "score"] * 4
    assert seconds < 4 * 0.5 + 4 * 1.0  # two at a time, and a second of grace for each new process


def test_a_call_that_ends_with_a_kill_is_followed_by_another():
    pool = make_pool(processes=1)
    assert pool.run(requests("exit"))[0].kind == "error"
    assert [outcome.score for outcome in pool.run(requests("score", "score", "score"))] == [1.0] * 3
    pool.close()


def test_the_time_limit_is_each_samples_own():
    pool = make_pool(limit_s=0.6, processes=1)
    outcomes = pool.run(requests(*[{"do": "nap", "s": 0.2}] * 6))
    pool.close()
    assert [outcome.kind for outcome in outcomes] == ["score"] * 6


def test_processes_are_light_stay_and_are_not_more_than_needed():
    pool = make_pool(processes=2, limit_s=10.0)
    [first] = pool.run(requests("environment"))
    many = pool.run(requests({"do": "nap", "s": 1.0}, *["environment"] * 50, {"do": "nap", "s": 1.0}))
    again = pool.run(requests({"do": "nap", "s": 0.2}, *["environment"] * 50, {"do": "nap", "s": 0.2}))
    pool.close()
    pids = {outcome.extra["pid"] for outcome in many[1:-1]}
    assert not first.extra["torch"] and first.extra["pid"] in pids and len(pids) == 2
    assert {outcome.extra["pid"] for outcome in again[1:-1]} <= pids
    assert pool.run(requests("score"))[0].score == 1.0  # and it can be used again
    pool.close()


DRIVER = """
import sys, time
from podium.workers.reward.functions import RewardSource
from podium.workers.reward.outcome import ScoreRequest
from podium.workers.reward.pool import ProcessPool
from podium.workers.reward.process_main import Job
pool = ProcessPool(Job(RewardSource(sys.argv[1]), "row", 1000.0, 0), 2, 512, 1)
pool.run([ScoreRequest("", "", "", {"do": do}) for do in ("leave_children", "score")])
print("started", flush=True)
pool.run([ScoreRequest("", "", "", {"do": "fork_and_sleep"})])
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_driver_that_is_killed(end):
    before = children()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, MISBEHAVING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert driver.stdout.readline() == "started\n"
    wait_for(lambda: len(children()) == len(before) + 4)
    driver.send_signal(end)
    driver.wait()
    wait_for(lambda: children() == before)


def test_functions_that_do_not_load(tmp_path):
    def error(text, **source):
        path = tmp_path / "reward.py"
        path.write_text(text)
        pool = make_pool(str(path), **source)
        with pytest.raises(UserError) as caught:
            pool.run(requests("score"))
        return str(caught.value)

    assert "at line 1 with ModuleNotFoundError" in error("import no_such_module_here")
    assert "ended with exit code 5" in error("import os\nos._exit(5)")
    assert "died of SIGSEGV" in error("import ctypes\nctypes.string_at(0)")
    assert "has no such function" in error("x = 1")
    with pytest.raises(UserError, match="no such file"):
        make_pool("/nowhere/reward.py").run(requests("score"))


def test_a_process_that_dies_of_nothing_is_told(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, threading, time\n"
        "def compute_score(**_):\n"
        "    threading.Thread(target=lambda: (time.sleep(0.05), print('bye', flush=True), os._exit(7))).start()\n"
        "    return 1.0\n"
    )
    pool = make_pool(str(path), processes=1)
    assert pool.run(requests("score"))[0].score == 1.0
    time.sleep(0.3)
    assert pool.run(requests("score"))[0].score == 1.0  # in a new process
    pool.close()


ASYNC = """
import asyncio, os, time
running = most = 0
seen = {}
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    global running, most
    do, s = extra_info["do"], extra_info.get("s", 0)
    running += 1
    most = max(most, running)
    try:
        await asyncio.sleep(s)
    finally:
        running -= 1
    if do == "block":
        time.sleep(1000)
    if do == "exit":
        os._exit(3)
    if do == "raise":
        raise ConnectionError("refused")
    if do == "flaky":
        seen[solution_str] = seen.get(solution_str, 0) + 1
        if seen[solution_str] < 3:
            raise ConnectionError("refused")
    return {"score": 1.0, "most": most, "pid": os.getpid()}
"""


@pytest.fixture(scope="module")
def async_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(ASYNC)
    return str(path)


def test_async_calls_overlap_within_the_limit(async_path):
    pool = make_pool(async_path, processes=2, concurrency=8)
    began = time.monotonic()
    outcomes = pool.run(requests(*[{"do": "score", "s": 0.1}] * 40))
    seconds = time.monotonic() - began
    pool.close()
    assert [outcome.score for outcome in outcomes] == [1.0] * 40
    assert max(outcome.extra["most"] for outcome in outcomes) <= 4 and seconds < 40 * 0.1


def test_async_calls_are_late_fail_and_are_tried_again_by_themselves(async_path):
    pool = make_pool(async_path, processes=1, concurrency=64, limit_s=4.0, retries=2)
    outcomes = pool.run(requests({"do": "score", "s": 100}, "raise", "flaky", *["score"] * 30))
    pool.close()
    assert [outcome.kind for outcome in outcomes] == ["timeout", "error"] + ["score"] * 31
    assert "no result in 4 s" in outcomes[0].reason and "ConnectionError: refused" in outcomes[1].reason


@pytest.mark.parametrize(
    ("deed", "kind", "reason"), [("block", "timeout", "no result in 1 s"), ("exit", "error", "exit code 3")]
)
def test_an_async_call_that_takes_its_process_along_is_found(async_path, deed, kind, reason):
    pool = make_pool(async_path, processes=1, concurrency=64, limit_s=1.0)
    outcomes = pool.run(requests(*["score"] * 3, deed, *["score"] * 3))
    pool.close()
    guilty = outcomes.pop(3)
    assert guilty.kind == kind and reason in guilty.reason
    assert [outcome.score for outcome in outcomes] == [1.0] * 6


def test_nothing_is_left_open(pool):
    pool.run(requests("score", "score", "score"))
    before = len(os.listdir("/proc/self/fd"))
    pool.run(requests(*["exit", "score", "segfault"] * 3))
    pool.run(requests("score", "score", "score"))
    assert abs(len(os.listdir("/proc/self/fd")) - before) <= 3  # one process more or less
