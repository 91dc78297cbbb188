"""Workers that raise, die, hang or never start, on both backends."""

from __future__ import annotations

import os
import signal
import time

import pytest

from podium.protocol import ClassWithInitArgs, ResourcePool, WorkerDied, WorkerError, WorkerTimeout
from podium.protocol.colocate import create_colocated_worker_cls
from podium.protocol.deadline import START, Deadline
from podium.utils.errors import UserError
from tests.protocol.conftest import ENV
from tests.protocol.workers import Distributed, Echo, FailsToStart

PAIR = dict(process_on_nodes=[2], cpus_per_rank=0.5)


def test_an_exception_arrives_with_its_place(group):
    rank = group.world_size - 1
    with pytest.raises(WorkerError, match="KeyError: 'missing'") as caught:
        group.fail(rank)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("echo", rank, "fail")
    assert "in fail" in error.remote_traceback and "workers.py" in str(error)
    with pytest.raises(WorkerError, match="cannot travel 3"):
        group.fail(0, "unpicklable")
    with pytest.raises(UserError, match="no such file"):
        group.fail(rank, "user")
    if group.world_size > 1:
        group.sleep(0, 0)  # rank 0 has finished its own failures' waits


def test_the_first_error_is_reported_while_others_wait(many):
    many.say("both are idle")
    start = time.monotonic()
    with pytest.raises(WorkerError):
        many.fail(1)
    assert time.monotonic() - start < 2.5  # the others sleep 3 s
    many.sleep(0, 0)


def test_a_deadline_names_who_is_silent(many):
    many.timeout_s = 0.3
    try:
        with pytest.raises(WorkerTimeout, match=r"echo.sleep did not finish within 0.3 s.*rank\(s\) 1") as caught:
            many.sleep(1, 1.5)
        assert caught.value.waiting_on == [1] and isinstance(caught.value, TimeoutError)
    finally:
        many.timeout_s = None
    many.sleep(0, 0)


def test_a_death_is_reported_with_exit_code_and_log(backend):
    """Killed while the other rank waits for it in a collective, whose own error must not hide the cause."""
    group = backend.start_group(ResourcePool(**PAIR), ClassWithInitArgs(Distributed), env=ENV, name="dist")
    assert group.alive() == [True, True]
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="'dist' rank 1 was killed by SIGKILL") as caught:
        group.die_in_collective(1)
    assert time.monotonic() - start < 10
    error = caught.value
    assert (error.exit_code, error.rank, error.method) == (-9, 1, "die_in_collective")
    assert error.last_log_lines[-1] == "about to die" and "about to die" in str(error)
    assert group.alive()[1] is False
    with pytest.raises(WorkerDied):
        group.total(1)
    group.shutdown()


def test_a_group_is_started_anew_where_it_was(backend):
    """After a death, and after a stop that nobody hears; what the constructors made is there again."""
    roles = {"echo": ClassWithInitArgs(Echo, "e"), "dist": ClassWithInitArgs(Distributed)}
    group = backend.start_group(
        ResourcePool(**PAIR), create_colocated_worker_cls(roles), env=ENV, timeout_s=60, name="both"
    ).spawn(roles)
    echo, dist = group["echo"], group["dist"]
    assert echo.answers(5)
    before = [rank["pid"] for rank in echo.whoami()]
    with pytest.raises(WorkerDied):
        dist.die_in_collective(1)
    assert not echo.answers(5)
    echo.restart()
    assert echo.alive() == [True, True] and echo.answers(5)
    pids = [rank["pid"] for rank in echo.whoami()]
    assert not {*before} & {*pids} and dist.total(1) == [3, 3]
    os.kill(pids[0], signal.SIGSTOP)
    assert not echo.answers(0.5)
    dist.restart()
    assert dist.total(1) == [3, 3] and not os.path.exists(f"/proc/{pids[0]}")
    echo.shutdown()


def test_a_deadline_of_its_own_names_its_phase_and_key(local_backend):
    slow = Deadline(0.3, "sleep", "some.deadlines.sleep_s")
    group = local_backend.start_group(
        ResourcePool([2]), ClassWithInitArgs(Echo), env=ENV, timeout_s=60, deadlines={"sleep": slow}, name="echo"
    )
    with pytest.raises(
        WorkerTimeout, match=r"0.3 s.*rank\(s\) 1 \(phase sleep; .*raise some.deadlines.sleep_s\)"
    ) as caught:
        group.sleep(1, 1.5)
    assert caught.value.phase == "sleep" and caught.value.waiting_on == [1]
    group.say("no other call has it")
    group.shutdown()


def test_constructors_have_a_deadline(backend):
    spec, limit = ClassWithInitArgs(FailsToStart, kind="slow"), Deadline(1.0, "init", "some.deadlines.init_s")
    with pytest.raises(WorkerTimeout, match=r"__init__ did not finish within 1 s.*some\.deadlines\.init_s"):
        backend.start_group(ResourcePool(**PAIR), spec, env=ENV, deadlines={START: limit})


def test_an_exit_is_a_death(local_backend):
    group = local_backend.start_group(ResourcePool([2]), ClassWithInitArgs(Echo), env=ENV, name="echo")
    with pytest.raises(WorkerDied, match="rank 1 exited with code 7") as caught:
        group.exit(1, 7)
    assert caught.value.exit_code == 7
    group.shutdown()


@pytest.mark.parametrize("ranks", [1, 2])
def test_constructors_that_raise(backend, ranks):
    roles = {"actor": ClassWithInitArgs(Echo), "critic": ClassWithInitArgs(FailsToStart)}
    pool = ResourcePool([ranks], cpus_per_rank=0.5)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="no weights") as caught:
        backend.start_group(pool, create_colocated_worker_cls(roles), env=ENV)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("critic", ranks - 1, "__init__") and "in __init__" in str(error)
    if ranks == 1:
        with pytest.raises(UserError, match=r"model\.path"):
            backend.start_group(pool, ClassWithInitArgs(FailsToStart, kind="user"), env=ENV)
    assert time.monotonic() - start < 60


def test_names_that_groups_need_are_refused():
    from podium.protocol import Dispatch, Worker, register

    class Bad(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def shutdown(self) -> None: ...

    with pytest.raises(UserError, match="Bad registers \\['shutdown'\\]"):
        ClassWithInitArgs(Bad)


def test_breakpoint_works_in_one_rank(local_backend, monkeypatch):
    hits = []
    monkeypatch.setattr("sys.breakpointhook", lambda: hits.append(1))
    group = local_backend.start_group(ResourcePool([1]), ClassWithInitArgs(Echo))
    group.apply(lambda data: (breakpoint(), data)[1], _one())
    assert hits == [1]
    group.shutdown()


def _one():
    import torch

    from podium.protocol import DataProto

    return DataProto.from_dict({"x": torch.zeros(1)})
