"""Deadlines of a call in the driver's own thread: told, and if nothing else helps, the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from podium.protocol import Backend, ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerTimeout, register
from podium.protocol.deadline import START, Deadline
from podium.protocol.watch import watching


def spin() -> None:
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


class Slow(Worker):
    """Does not come back."""

    def __init__(self, start_s: float = 0.0) -> None:
        time.sleep(start_s)

    @register(Dispatch.ONE_TO_ALL)
    def sleeps(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"

    @register(Dispatch.ONE_TO_ALL)
    def spins(self) -> None:
        spin()


def start(backend: Backend, start_s: float = 0.0):
    deadlines = {name: Deadline(0.4, "update", "some.key") for name in (START, "sleeps", "spins")}
    return backend.start_group(ResourcePool([1]), ClassWithInitArgs(Slow, start_s), deadlines=deadlines)


def test_the_only_rank_is_interrupted_where_it_is(local_backend: Backend):
    before = signal.getsignal(signal.SIGUSR2)
    group = start(local_backend)
    for call, place in ((lambda: group.sleeps(60), "time.sleep(seconds)"), (group.spins, "in spin")):
        began = time.monotonic()
        with pytest.raises(
            WorkerTimeout, match=r"Slow\.\w+ did not finish within 0.4 s.*phase update.*some\.key"
        ) as caught:
            call()
        assert time.monotonic() - began < 10 and caught.value.rank == 0
        assert "it was at:" in caught.value.__notes__[0] and place in caught.value.__notes__[0]
    assert group.sleeps(0) == ["awake"], "the group is still of use"
    time.sleep(0.5)  # nothing comes late
    assert signal.getsignal(signal.SIGUSR2) is before


def test_constructors_are_interrupted_too(local_backend: Backend):
    with pytest.raises(WorkerTimeout, match=r"Slow\.__init__ did not finish within 0.4 s.*some\.key"):
        start(local_backend, start_s=60)


def test_other_errors_and_calls_without_a_limit_are_left_alone():
    with pytest.raises(ZeroDivisionError), watching("role", "method", Deadline(5.0)):
        1 / 0  # noqa: B018
    with pytest.raises(KeyboardInterrupt), watching("role", "method", Deadline(5.0)):
        signal.raise_signal(signal.SIGINT)
    before = signal.getsignal(signal.SIGUSR2)
    with watching("role", "method", Deadline(None)):
        assert signal.getsignal(signal.SIGUSR2) is before


def test_one_thread_keeps_every_deadline():
    """Also a nearer one than it is waiting for, and one after a call that was late."""
    with watching("role", "method", Deadline(1000.0)):
        pass
    threads = threading.active_count()
    for _ in range(3):
        _within(1000.0, lambda: None)
        with pytest.raises(WorkerTimeout, match=r"role\.method did not finish within 0\.1 s"):
            _within(0.1, lambda: time.sleep(60))
    assert threading.active_count() == threads


def test_a_forked_process_has_its_own():
    _within(1000.0, lambda: None)
    child = os.fork()
    if child == 0:
        try:
            _within(0.1, lambda: time.sleep(60))
        except WorkerTimeout:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def in_a_thread() -> None:
    thread = threading.Thread(target=lambda: _within(0.05, lambda: time.sleep(0.3)))
    thread.start()
    thread.join()


def in_a_debugger() -> None:
    exec("import time\ntime.sleep(0.3)", {"__name__": "pdb"})


def _within(seconds: float, call: Callable[[], None]) -> None:
    with watching("role", "method", Deadline(seconds)):
        call()


def test_other_threads_and_debuggers_have_all_the_time_there_is():
    in_a_thread()
    _within(0.05, in_a_debugger)


STUBBORN = """
import time
from podium.protocol import watch
watch.GRACE_S = 0.5
def never():
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            time.sleep(1)
        except BaseException:
            pass
with watch.watching("actor", "update_actor", watch.Deadline(0.2, "update", "some.key")):
    never()
"""


def test_what_cannot_be_interrupted_ends_with_the_process():
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and time.monotonic() - began < 40
    assert "actor.update_actor did not finish within 0.2 s" in done.stderr and "raise some.key" in done.stderr
    assert "nor could it be interrupted in 0.5 s more" in done.stderr
    assert "in never" in done.stderr and "Current thread" in done.stderr
