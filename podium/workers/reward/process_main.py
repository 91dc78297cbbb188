"""What a scoring process runs: ``process_main.main(socket fd, page fd, memory limit)``.

It starts in tens of milliseconds: nothing that it imports needs torch. The reward function runs in the main thread, so
that it may use signals.
"""

import asyncio
import contextlib
import faulthandler
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from podium.utils.errors import UserError
from podium.utils.process_tree import become_subreaper, kill_below
from podium.workers.reward.call import Failure, call_async, call_batch, call_row, is_async
from podium.workers.reward.channel import NOTHING, Progress, Unpacker, pack
from podium.workers.reward.functions import RewardFn
from podium.workers.reward.outcome import Outcome, outcome_of_error

HELLO = -2
"""Item number of the first message, which says whether the function is there."""
# Results wait for each other for so long: fewer and larger messages, and a driver that sleeps meanwhile. Those that
# wait when a process must be killed are computed again.
_HOLD_S = 0.02
HEARTBEAT_S = 0.5
_PIECE = 1 << 16


class Source(Protocol):
    """What can be sent to a process and gives a reward function there."""

    def load(self) -> RewardFn:
        """Imports it; a `UserError` says why that fails."""
        ...


@dataclass(frozen=True)
class Job:
    """What to run on the items, as the driver sends it first."""

    source: Source
    form: Literal["row", "batch"]
    """An item is one request, or a list of them."""
    limit_s: float
    retries: int
    """Of async functions."""


@dataclass(frozen=True)
class Hello:
    """The process's answer to its job."""

    asynchronous: bool = False
    error: str | None = None
    """Why the function could not be loaded."""


def main(socket_fd: int, page_fd: int, memory_limit_mb: int | None) -> None:
    """Serves until the driver closes the socket."""
    become_subreaper()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the driver asks where a late one is
    if memory_limit_mb is not None:
        limit = memory_limit_mb << 20
        # Memory that is the process's own; address space that is only reserved (a CUDA context) is not counted.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = _Server(socket.socket(fileno=socket_fd), Progress(page_fd))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the driver is gone
        server.run()
    kill_below(os.getpid())  # while they are known: what is left when this has ended belongs to nobody
    os._exit(0)  # threads that the user's module has left running must not hold the process


class _Server:
    def __init__(self, channel: socket.socket, progress: Progress):
        self._socket, self._progress = channel, progress
        self._unpacker = Unpacker()
        self._pid, self._fd = os.getpid(), channel.fileno()
        self._results: list[tuple[int, bytes]] = []
        self._sent_at = time.monotonic()

    def run(self) -> None:
        job = self._receive_job()
        if job is None:
            return
        try:
            fn = job.source.load()
        except UserError as error:
            return self._hello(Hello(error=str(error)))
        except Failure as error:
            return self._hello(Hello(error=outcome_of_error(error, __file__).reason))
        asynchronous = job.form == "row" and is_async(fn)
        self._hello(Hello(asynchronous))
        if asynchronous:
            asyncio.run(self._serve_async(fn, job))
        else:
            self._serve(fn, job)

    def _hello(self, hello: Hello) -> None:
        self._put(HELLO, hello)
        self._flush()

    def _receive_job(self) -> Job | None:
        while data := self._socket.recv(_PIECE):
            for job in self._unpacker.feed(data):
                return job
        return None

    def _serve(self, fn: RewardFn, job: Job) -> None:
        self._progress.set(NOTHING)
        while data := self._socket.recv(_PIECE):
            for items in self._unpacker.feed(data):
                for number, item in items:
                    self._progress.set(number)
                    self._put(number, _call(fn, job.form, item))
                    signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that it left set would hit the next item
                self._flush()
                self._progress.set(NOTHING)

    async def _serve_async(self, fn: RewardFn, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)

        async def one(number: int, item: bytes) -> None:
            self._put(number, await call_async(fn, pickle.loads(item), job.limit_s, job.retries))
            loop.call_soon(self._flush)

        async def heartbeat() -> None:
            while True:
                self._progress.set(NOTHING)
                await asyncio.sleep(HEARTBEAT_S)

        tasks = {asyncio.create_task(heartbeat())}
        while data := await loop.sock_recv(self._socket, _PIECE):
            for items in self._unpacker.feed(data):
                for number, item in items:
                    task = asyncio.create_task(one(number, item))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

    def _put(self, number: int, result: Any) -> None:
        if os.getpid() != self._pid:  # the function forked, and this is the child
            os._exit(0)
        os.fstat(self._fd)  # a function that closes what it does not know ends its process here, not an item later
        try:
            data = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            reason = " ".join(f"what it returned cannot be sent to the driver ({error})".split())
            data = pickle.dumps(Outcome("error", reason=reason))
        self._results.append((number, data))
        if time.monotonic() - self._sent_at > _HOLD_S:
            self._flush()

    def _flush(self) -> None:
        if not self._results:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, AttributeError):  # the function closed or replaced it
                stream.flush()
        message = memoryview(pack(self._results))
        self._results = []
        while message:
            try:
                message = message[self._socket.send(message) :]
            except BlockingIOError:
                select.select([], [self._socket], [])
        self._sent_at = time.monotonic()


def _call(fn: RewardFn, form: str, item: bytes) -> Any:
    request = pickle.loads(item)
    return call_batch(fn, request) if form == "batch" else call_row(fn, request)
