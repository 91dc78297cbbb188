"""The driver's end of one scoring process."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

from podium.utils.process_tree import kill_tree, start_ticks
from podium.workers.reward.channel import Progress, Unpacker, pack
from podium.workers.reward.process_main import Job

_PIECE = 1 << 16
_TAIL = 8192
_DUMP_S = 0.2
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _command(module: str, call: str) -> list[str]:
    """A fresh interpreter that finds modules where this one does."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {json.dumps(sys.path)}; import {module} as m; m.{call}"]


class Reaper:
    """A process that outlives the driver just long enough to kill what it has left."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            _command("podium.workers.reward.reaper", "main()"), stdin=subprocess.PIPE, start_new_session=True, bufsize=0
        )

    def watch(self, pid: int) -> None:
        """Has `pid` killed with the driver."""
        self._say(f"+{pid} {start_ticks(pid)}\n")

    def forget(self, pid: int) -> None:
        """`pid` has ended."""
        self._say(f"-{pid}\n")

    def close(self) -> None:
        """Ends it, which ends whatever it still watches."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())


class ScoringProcess:
    """A process that scores items one after the other, or an async function's together.

    Args:
        job: what it runs.
        memory_limit_mb: MiB that it, and each process below it, may have of its own.
    """

    def __init__(self, job: Job, memory_limit_mb: int | None, reaper: Reaper):
        self.channel, theirs = socket.socketpair()
        self._progress = Progress()
        self.output, writes = os.pipe()
        os.set_blocking(self.output, False)
        environment = {**dict.fromkeys(_ONE_THREAD, "1"), **os.environ}
        call = f"main({theirs.fileno()}, {self._progress.fd}, {memory_limit_mb})"
        self._process = subprocess.Popen(
            _command("podium.workers.reward.process_main", call),
            stdin=subprocess.DEVNULL,
            stdout=writes,
            stderr=writes,
            env=environment,
            pass_fds=(theirs.fileno(), self._progress.fd),
            start_new_session=True,
        )
        theirs.close()
        os.close(writes)
        self.channel.setblocking(False)
        self.ended = os.pidfd_open(self._process.pid)
        self.in_flight: dict[int, None] = {}
        """Items that were sent and are not answered, in their order."""
        self.asynchronous: bool | None = None
        """None until it has said so."""
        self.began = time.monotonic()
        self._unpacker = Unpacker()
        self._outbox = pack(job)
        self._tail = bytearray()
        self._reaper = reaper
        reaper.watch(self._process.pid)

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outbox)

    def send(self, items: list[tuple[int, bytes]]) -> None:
        """Gives it numbered items; `pump_out` moves them."""
        self.in_flight.update(dict.fromkeys(number for number, _ in items))
        self._outbox += pack(items)

    def pump_out(self) -> None:
        """Sends what the socket takes."""
        try:
            self._outbox = self._outbox[self.channel.send(self._outbox) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # it has died; `ended` says so too
            self._outbox = b""

    def receive(self) -> list[tuple[int, bytes]] | None:
        """The answers that have arrived; None when no more will come."""
        try:
            data = self.channel.recv(_PIECE)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        return [answer for answers in self._unpacker.feed(data) for answer in answers] if data else None

    def read_output(self) -> bytes | None:
        """What it has printed since the last call, at most 64 KiB; None when no more will come."""
        try:
            data = os.read(self.output, _PIECE)
        except BlockingIOError:
            return b""
        self._tail = (self._tail + data)[-_TAIL:]
        return data or None

    def has_answers(self) -> bool:
        """Whether `receive` would have something."""
        return bool(select.select([self.channel], [], [], 0)[0])

    def at(self) -> tuple[int, float]:
        """The item that it is at, and since when (`time.monotonic`)."""
        return self._progress.get()

    def tail(self) -> str:
        """The last that it printed."""
        return self._tail.decode(errors="replace")

    def dump_stacks(self) -> None:
        """Has it print where it is, for `tail`."""
        os.kill(self._process.pid, signal.SIGUSR2)
        until = time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            if not self.read_output():
                time.sleep(0.01)

    def end(self, grace_s: float = 0.0) -> str:
        """Kills it, with all that it has started, unless it has ended by then. Returns how it ended."""
        select.select([self.ended], [], [], grace_s)
        code = self._process.poll()
        kill_tree(self._process.pid)
        self._process.wait()
        while self.read_output():
            continue
        self._reaper.forget(self._process.pid)
        self._progress.close()
        self.channel.close()
        os.close(self.output)
        os.close(self.ended)
        if code is None:
            return "was killed"
        return f"ended with exit code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
