"""Running the command lines, and seeing what they leave behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARKER = "PODIUM_TEST_RUN"
PPO, SFT = "podium.trainer.main_ppo", "podium.trainer.main_sft"
_GRACE_S = 15.0


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int | None
    """None: it ran past its time limit."""
    out: str
    err: str
    seconds: float
    left: list[str] = field(default_factory=list)
    """Command lines of the processes that were still there 15 s after the end."""

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n-- stdout\n{self.out}\n-- stderr\n{self.err}"


def environment(marker: str) -> dict[str, str]:
    """What the tests add to the environment: one thread, no network, and a mark on every process."""
    return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), MARKER: marker}


def run(program: str, argv: list[str], timeout_s: float = 300.0, env: dict[str, str] | None = None) -> Result:
    """``python -m program argv`` as a user runs it."""
    marker = uuid.uuid4().hex
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", program, *argv],
        env={**_without_ray(), **environment(marker), **(env or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        code = None
    seconds = time.perf_counter() - began
    return Result(code, out, err, seconds, leftovers(marker, process.pid))


class Preloaded:
    """Forks of one process for the cases in which importing torch would be most of the time."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("preloaded.py"))],
            env={**_without_ray(), **environment("server")},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._read(300.0) == "ready"

    def __call__(
        self,
        program: str,
        argv: list[str],
        *,
        timeout_s: float = 120.0,
        signal_after: str | None = None,
        signal_number: int = signal.SIGINT,
        signal_at_s: float | None = None,
        env: dict[str, str] | None = None,
    ) -> Result:
        """Runs a module or a script.

        With `signal_after`, interrupts it (Ctrl-C, or another signal to it alone) once it has printed that text or
        started a program of that name; with `signal_at_s`, after so many seconds.
        """
        marker = uuid.uuid4().hex
        out, err = self._folder / f"{marker}.out", self._folder / f"{marker}.err"
        out.touch()
        request = {
            "program": program,
            "argv": argv,
            "out": str(out),
            "err": str(err),
            "timeout_s": timeout_s,
            "signal_after": signal_after,
            "signal_number": signal_number,
            "signal_at_s": signal_at_s,
            "env": {MARKER: marker, **(env or {})},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read(timeout_s + 30.0))
        left = leftovers(marker, answer["pid"])
        return Result(answer["code"], out.read_text(), err.read_text(), answer["seconds"], left)

    def close(self) -> None:
        self._process.communicate()

    def _read(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, "the preloaded process does not answer"
        return self._process.stdout.readline().strip()


def leftovers(marker: str, session: int) -> list[str]:
    """Command lines of processes that carry the mark or belong to the session after a grace; they are killed."""
    until = time.monotonic() + _GRACE_S
    while (found := marked(marker, session)) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return list(found.values())


def marked(marker: str, session: int) -> dict[int, str]:
    """Command lines by process id."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if after_name[0] == "Z" or int(folder.name) == os.getpid():
                continue
            in_session = int(after_name[3]) == session
            if in_session or f"{MARKER}={marker}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except (OSError, IndexError):
            continue
    return found


def _without_ray() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
