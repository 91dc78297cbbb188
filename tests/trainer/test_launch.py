"""Starting the roles of a run."""

import os

import pytest
import torch

from podium.protocol import ClassWithInitArgs, Dispatch, Worker, register
from podium.trainer.config.ppo import TrainerConfig
from podium.trainer.launch import resolve_device, worker_groups
from podium.utils.errors import UserError


class Where(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self):
        other = self.peer("second")
        return (
            os.getpid(),
            self.world_size,
            os.environ["PODIUM_DEVICE"],
            os.environ["OMP_NUM_THREADS"],
            other is not None,
        )


def test_device():
    there = torch.cuda.is_available()
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == ("cuda" if there else "cpu")
    if not there:
        with pytest.raises(UserError, match=r"trainer\.device=cuda"):
            resolve_device("cuda")


def roles() -> dict[str, ClassWithInitArgs]:
    return {"first": ClassWithInitArgs(Where), "second": ClassWithInitArgs(Where)}


def test_one_local_rank_is_this_process(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PODIUM_DEVICE", raising=False)
    with worker_groups(TrainerConfig(backend="local"), "cpu", roles(), "t") as groups:
        assert list(groups) == ["first", "second"]
        assert groups["first"].environment() == [(os.getpid(), 1, "cpu", "1", True)]
        assert groups["second"].environment()[0][0] == os.getpid()
    assert "PODIUM_DEVICE" not in os.environ


def test_each_rank_holds_every_role_and_shares_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    with worker_groups(TrainerConfig(backend="local", n_gpus_per_node=2), "cpu", roles(), "t") as groups:
        answers = [groups[role].environment() for role in ("first", "second")]
    assert [a[0] for a in answers[0]] == [a[0] for a in answers[1]]
    assert len({a[0] for a in answers[0]} - {os.getpid()}) == 2
    # Six of seven cores for two ranks: one is the driver's.
    assert [a[1:] for a in answers[0]] == [(2, "cpu", "3", True)] * 2


def test_roles_end_with_the_block_also_when_it_raises():
    with (
        pytest.raises(RuntimeError, match="mid-run"),
        worker_groups(TrainerConfig(backend="local", n_gpus_per_node=2), "cpu", roles(), "t") as groups,
    ):
        pids = [answer[0] for answer in groups["first"].environment()]
        raise RuntimeError("mid-run")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
