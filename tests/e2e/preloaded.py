"""Runs command lines in forks of a process that has the heavy imports behind it: ``python preloaded.py``.

One JSON request a line on stdin, one JSON answer a line on stdout. Each fork runs the module or script as ``__main__``:
its exit code, its stderr and what it leaves behind are those of the real command.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from tests.e2e.commands import MARKER, marked


def serve() -> dict[str, Any]:
    """Answers requests; returns in the fork only, with what to run."""
    import pyarrow.dataset  # noqa: F401
    from transformers.models.auto import modeling_auto, tokenization_auto  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import podium.trainer.config
    import podium.trainer.launch
    import podium.trainer.ppo.roles
    import podium.trainer.ppo.trainer
    import podium.utils.dataset
    import podium.utils.tracking
    import podium.workers.reward.manager
    import podium.workers.rollout.hf

    podium.trainer.config.load_config(podium.trainer.config.PPOConfig, ["data.seed=1"])  # warms the parser
    print("ready", flush=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        began = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            return request
        code = _wait(pid, request)
        print(json.dumps({"pid": pid, "code": code, "seconds": time.perf_counter() - began}), flush=True)
    sys.exit(0)


def _wait(pid: int, request: dict[str, Any]) -> int | None:
    """The exit code (negative: the signal), or None after the time limit.

    Interrupts it once it has printed a text, or has started a program of that name.
    """
    until = time.monotonic() + request["timeout_s"]
    trigger = request.get("signal_after")
    at = None if request["signal_at_s"] is None else time.monotonic() + request["signal_at_s"]
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if trigger and (trigger in Path(request["out"]).read_text() or _is_running(trigger, request["env"][MARKER])):
            if request["signal_number"] == signal.SIGINT:
                os.killpg(pid, signal.SIGINT)  # as a terminal does
            else:
                os.kill(pid, request["signal_number"])
            trigger = None
        if at is not None and time.monotonic() >= at:
            os.kill(pid, request["signal_number"])
            at = None
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _is_running(program: str, marker: str) -> bool:
    return any(program in line.split(" ")[0] for line in marked(marker, -1).values())


def become(request: dict[str, Any]) -> None:
    """A session, streams, environment and arguments of its own."""
    os.setsid()
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(path, flags), fd)
    sys.stdin = open(0)  # noqa: SIM115 - the inherited one has buffered other requests
    os.environ.update(request["env"])
    sys.argv[1:] = request["argv"]


def run(program: str) -> int:
    """The exit code of a module or a script."""
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """What Python does at its end, without taking torch apart object by object: that is over a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    wanted = serve()
    become(wanted)
    leave(run(wanted["program"]))
