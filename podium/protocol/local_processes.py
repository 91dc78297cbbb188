"""Ranks in processes of this machine, for the local backend."""

from __future__ import annotations

import atexit
import collections
import concurrent.futures as cf
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pickle import PickleBuffer
from typing import Any

from podium.protocol.deadline import NO_DEADLINE, Deadline
from podium.protocol.errors import WorkerDied, WorkerError, died, timed_out
from podium.protocol.future import Handle, gather
from podium.protocol.group import Call, ClassWithInitArgs, Transport
from podium.protocol.local_child import CALL, CONSTRUCT, ERROR, EXIT
from podium.protocol.wire import Message, encode, receive, send
from podium.protocol.worker import ProcessContext
from podium.utils.ports import lend_port, release_port, reserve_port

_GRACE_S = 0.3  # a death breaks the other ranks' collectives; wait this long to report the death and not what it broke
_EXIT_S = 5.0
_LOG_LINES = 20


class _Reply(Handle):
    """One rank's answer, kept encoded until somebody asks for it."""

    def __init__(self, role: str, rank: int, method: str) -> None:
        self.role, self.rank, self.method = role, rank, method
        self.future: cf.Future[Message] = cf.Future()
        self.failed_at = float("inf")

    def fail(self, error: BaseException) -> None:
        self.failed_at = time.monotonic()
        if not self.future.done():
            self.future.set_exception(error)

    @classmethod
    def gather(cls, handles: Sequence[Any], timeout_s: float | None) -> list[Any]:
        futures = [h.future for h in handles]
        done, _ = cf.wait(futures, timeout_s, cf.FIRST_EXCEPTION)
        failed = _failures(handles)
        if failed and not isinstance(failed[0].future.exception(), WorkerDied):
            cf.wait(futures, _GRACE_S, cf.ALL_COMPLETED)
            deaths = [h for h in _failures(handles) if isinstance(h.future.exception(), WorkerDied)]
            failed = deaths or failed
        if failed:
            raise failed[0].future.exception()  # type: ignore[misc]
        if len(done) < len(futures):
            silent = [(h.role, h.rank) for h in handles if not h.future.done()]
            raise timed_out(handles[0].method, silent, timeout_s or 0.0)
        return [f.result().content() for f in futures]

    @classmethod
    def ready(cls, handles: Sequence[Any]) -> bool:
        return all(h.future.done() for h in handles)

    def __reduce__(self) -> tuple[Any, ...]:
        # To another local rank: the encoded answer is passed on as it is.
        frames = [PickleBuffer(f) for f in self.future.result().frames]
        return _Relayed, (self.role, self.rank, self.method, frames)


def _failures(handles: Sequence[_Reply]) -> list[_Reply]:
    return sorted((h for h in handles if h.failed_at < float("inf")), key=lambda h: h.failed_at)


class _Relayed(Handle):
    """In a rank: another rank's answer."""

    def __init__(self, role: str, rank: int, method: str, frames: list[Any]) -> None:
        self.role, self.rank, self.method = role, rank, method
        self.message = Message(0, 0, frames)

    @classmethod
    def gather(cls, handles: Sequence[Any], timeout_s: float | None) -> list[Any]:
        return [h.message.content() for h in handles]

    @classmethod
    def ready(cls, handles: Sequence[Any]) -> bool:
        return True


class _Process:
    """One rank's process, its socket, and the threads that read its answers and its output.

    Args:
        lent: the descriptor that holds the world's port, for the rank that will listen there.
    """

    def __init__(self, label: str, rank: int, env: Mapping[str, str], lent: Sequence[int] = ()) -> None:
        self.label, self.rank = label, rank
        self.ended: WorkerDied | None = None
        self.closing = False
        self._pending: dict[int, _Reply] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self._sock, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-u", "-m", "podium.protocol.local_child"]
            self._popen = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), *map(str, lent)],
                pass_fds=[theirs.fileno(), *lent],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # Ctrl-C must reach the driver alone, and a group of its own takes the rank's own children along.
                start_new_session=True,
            )
        self._pumps = [
            threading.Thread(target=self._pump, args=(stream, name), daemon=True)
            for stream, name in ((self._popen.stdout, "stdout"), (self._popen.stderr, "stderr"))
        ]
        for thread in [*self._pumps, threading.Thread(target=self._receive, daemon=True)]:
            thread.start()

    def submit(self, reply: _Reply, kind: int, frames: list[Any]) -> None:
        with self._lock:
            if self.ended is not None:
                reply.fail(self._death(reply))
                return
            number = next(self._numbers)
            self._pending[number] = reply
        with contextlib.suppress(OSError), self._send_lock:  # a broken socket is reported by _receive
            send(self._sock, Message(number, kind, frames))

    def busy(self) -> bool:
        return bool(self._pending)

    def alive(self) -> bool:
        return self.ended is None and self._popen.poll() is None

    def ask_to_exit(self) -> None:
        self.closing = True
        if self.busy():
            self.kill()
            return
        with contextlib.suppress(OSError), self._send_lock:
            send(self._sock, Message(0, EXIT, [b""]))

    def join(self, until: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, until - time.monotonic()))
        self.kill()  # its children too, which may outlive it
        self._popen.wait()
        for thread in self._pumps:
            thread.join(1.0)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _receive(self) -> None:
        try:
            while True:
                message = receive(self._sock)
                with self._lock:
                    reply = self._pending.pop(message.number)
                if message.kind == ERROR:
                    error = message.content()
                    if isinstance(error, WorkerError):
                        error.role, error.method = error.role or reply.role, error.method or reply.method
                    reply.fail(error)
                else:
                    reply.future.set_result(message)
                del message, reply
        except (OSError, EOFError):
            self._lost()

    def _lost(self) -> None:
        try:
            code: int | None = self._popen.wait(3.0)
        except subprocess.TimeoutExpired:  # it closed its socket and lives on: of no use to anybody
            self.kill()
            code = self._popen.wait()
        if not self.closing:
            for thread in self._pumps:
                thread.join(1.0)
        with self._lock:
            self.ended = died(self.label, self.rank, "", code, list(self._lines))
            waiting, self._pending = list(self._pending.values()), {}
        for reply in waiting:
            reply.fail(self._death(reply))

    def _death(self, reply: _Reply) -> WorkerDied:
        assert self.ended is not None
        return died(reply.role, self.rank, reply.method, self.ended.exit_code, self.ended.last_log_lines)

    def _pump(self, stream: Any, name: str) -> None:
        for line in stream:
            self._lines.append(line.rstrip("\n"))
            with contextlib.suppress(OSError, ValueError):  # the driver's own stream may be closed
                out = getattr(sys, name)
                out.write(f"[{self.label} rank {self.rank}] {line.rstrip()}\n")
                out.flush()


class Processes(Transport):
    """Several ranks, one spawned process each."""

    def __init__(
        self,
        spec: ClassWithInitArgs,
        role: str,
        world_size: int,
        env: Mapping[str, str],
        start_deadline: Deadline = NO_DEADLINE,
    ) -> None:
        self.world_size = world_size
        self._ranks: list[_Process] = []
        self._spec, self._role, self._env, self._start_deadline = spec, role, env, start_deadline
        self._start()

    def restart(self) -> None:
        self.close()
        self._start()

    def _start(self) -> None:
        spec, role, world_size = self._spec, self._role, self.world_size
        _live.add(self)
        whole = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        whole.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
        whole.update(self._env)
        port = reserve_port("127.0.0.1", "world")
        roles = spec.roles if spec.roles is not None else {role: spec}
        try:
            contexts = [ProcessContext(r, world_size, r, world_size, "127.0.0.1", port) for r in range(world_size)]
            for context in contexts:
                lent = [lend_port("world")] if context.rank == 0 else []
                self._ranks.append(_Process(role, context.rank, {**whole, **context.env()}, lent))
            release_port("world")
            replies = [_Reply(role, rank, "__init__") for rank in range(world_size)]
            for process, reply, context in zip(self._ranks, replies, contexts, strict=True):
                process.submit(reply, CONSTRUCT, encode((context, roles)))
            gather(replies, self._start_deadline)
        except BaseException:
            self.close()
            raise

    def submit(self, role: str, method: str, calls: Sequence[Call]) -> list[Handle]:
        replies: list[Handle] = []
        encoded: dict[tuple[Any, ...], list[Any]] = {}
        for rank, (args, kwargs, answer) in enumerate(calls):
            reply = _Reply(role, rank, method)
            # A broadcast is encoded once.
            key = (answer, *map(id, args), *kwargs, *map(id, kwargs.values()))
            if key not in encoded:
                encoded[key] = encode((role, method, args, kwargs, answer))
            self._ranks[rank].submit(reply, CALL, encoded[key])
            replies.append(reply)
        return replies

    def alive(self) -> list[bool]:
        return [p.alive() for p in self._ranks]

    def close(self) -> None:
        _live.discard(self)
        ranks, self._ranks = self._ranks, []
        for process in ranks:
            process.ask_to_exit()
        until = time.monotonic() + _EXIT_S
        for process in ranks:
            process.join(until)


_live: weakref.WeakSet[Processes] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for transport in list(_live):
        transport.close()
