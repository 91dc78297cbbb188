"""One run at a time in a run directory: real processes that hold it, die, fork and start others."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from podium.utils import run_lock
from podium.utils.errors import UserError
from podium.utils.run_lock import only_run

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from podium.utils.run_lock import only_run
with only_run(Path(sys.argv[1])):
    started = []
    if sys.argv[2] == "start":
        started = [subprocess.Popen(["sleep", "60"], close_fds=False)]
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(60)
        started = [child]
    print(*[getattr(it, "pid", it) for it in started], flush=True)
    time.sleep(60)
"""


def hold(run_dir: Path, does: str = "") -> tuple[subprocess.Popen[str], list[int]]:
    """A process that has the directory, and what it has started."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), does], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert holder.stdout is not None
    return holder, [int(pid) for pid in holder.stdout.readline().split()]


def test_a_second_run_is_told_who_has_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.2)
    holder, _ = hold(tmp_path)
    try:
        with (
            pytest.raises(UserError, match=rf"{tmp_path} is in use by another run \(process {holder.pid} on \w+"),
            only_run(tmp_path),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    with only_run(tmp_path):
        pass


@pytest.mark.parametrize("does", ["start", "fork"])
def test_a_killed_run_is_followed_at_once_whatever_it_has_left_behind(tmp_path: Path, does: str):
    holder, left = hold(tmp_path, does)
    try:
        holder.send_signal(signal.SIGKILL)  # and no wait for its end
        with only_run(tmp_path):
            assert left and all(Path(f"/proc/{pid}").exists() for pid in left)
    finally:
        holder.wait()
        for pid in left:
            os.kill(pid, signal.SIGKILL)


def test_a_process_may_run_one_after_the_other(tmp_path: Path):
    for _ in range(2):
        with only_run(tmp_path):
            pass
    with pytest.raises(ValueError, match="fault"), only_run(tmp_path):
        raise ValueError("fault")
    with only_run(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_without_locks_the_run_goes_on(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with only_run(tmp_path):
        pass
    assert f"warning: the file system of {tmp_path} has no locks" in capsys.readouterr().err


def test_other_failures_name_the_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(UserError, match=rf"{tmp_path}: it cannot be locked: Input/output"), only_run(tmp_path):
        pass
    (tmp_path / "run.lock").unlink()
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(UserError, match=r"run.lock cannot be opened: Is a directory"), only_run(tmp_path):
        pass


def failing(number: int) -> Callable[..., None]:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return flock


def test_patience_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.3)
    with only_run(tmp_path):
        began = time.monotonic()
        with pytest.raises(UserError, match=f"process {os.getpid()} on"), only_run(tmp_path):
            pass
        assert 0.3 <= time.monotonic() - began < 5
