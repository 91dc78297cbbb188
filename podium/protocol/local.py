"""The local backend: one rank in this process, several in processes of their own."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.protocol.backend import Backend, free_port, role_name
from podium.protocol.data import DataProto
from podium.protocol.deadline import NO_DEADLINE, START, Deadline, Deadlines, deadline_of
from podium.protocol.errors import WorkerError
from podium.protocol.future import Handle, gather
from podium.protocol.group import Call, ClassWithInitArgs, Transport, WorkerGroup, make_group
from podium.protocol.host import RoleHost
from podium.protocol.resource import ResourcePool
from podium.protocol.watch import watching
from podium.protocol.worker import ProcessContext
from podium.utils.errors import UserError


class _Done(Handle):
    """A call that has been made: its value or its exception."""

    def __init__(self, role: str, method: str, value: Any, error: Exception | None) -> None:
        self.role, self.rank, self.method = role, 0, method
        self.value, self.error = value, error

    @classmethod
    def gather(cls, handles: Sequence[Any], timeout_s: float | None) -> list[Any]:
        for h in handles:
            if h.error is not None:
                raise h.error
        return [h.value for h in handles]

    @classmethod
    def ready(cls, handles: Sequence[Any]) -> bool:
        return True


class InProcess(Transport):
    """Rank 0 of 1, here: calls run at once in the calling thread, so ``breakpoint()`` works."""

    world_size = 1

    def __init__(
        self, spec: ClassWithInitArgs, role: str, env: Mapping[str, str], timeout_s: float | None, deadlines: Deadlines
    ) -> None:
        self._timeout_s, self._deadlines = timeout_s, deadlines
        context = ProcessContext(master_port=free_port())
        # Put back by close(); torch was imported long ago, so a variable it reads at import comes too late here.
        self._before = {k: os.environ.get(k) for k in {*env, *context.env()}}
        os.environ.update(env)
        self._host = RoleHost(context)
        roles = spec.roles if spec.roles is not None else {role: spec}
        start = deadlines.get(START, NO_DEADLINE)
        try:
            gather([_done(role, "__init__", start, lambda: self._host.construct(roles))], start)
        except BaseException:
            self.close()
            raise

    def submit(self, role: str, method: str, calls: Sequence[Call]) -> list[Handle]:
        (args, kwargs, answer) = calls[0]
        args, kwargs = tuple(_own(a) for a in args), {k: _own(v) for k, v in kwargs.items()}
        deadline = deadline_of(method, self._deadlines, self._timeout_s)
        return [_done(role, method, deadline, lambda: self._host.call(role, method, args, kwargs, answer))]

    def restart(self) -> None:
        raise WorkerError("the ranks are in the driver's process, which cannot be started anew")

    def close(self) -> None:
        for key, value in self._before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        self._before = {}
        self._host.context.roles.clear()


def _done(role: str, method: str, deadline: Deadline, call: Callable[[], Any]) -> _Done:
    try:
        with watching(role, method, deadline):
            return _Done(role, method, call(), None)
    except Exception as e:  # kept for gather: a non-blocking call raises when its future is asked
        return _Done(role, method, None, e)


def _own(value: Any) -> Any:
    """Columns that a worker adds or removes must not show in the driver's batch, as they would not over a wire."""
    return copy.copy(value) if isinstance(value, DataProto) else value


class LocalBackend(Backend):
    """One rank: in this process. Several: spawned processes on this machine that end with it, however it ends.

    Args:
        in_process: False gives a single rank a process of its own too; two in this one could not wait for each other.
    """

    def __init__(self, in_process: bool = True) -> None:
        self._in_process = in_process
        self._transports: list[Transport] = []

    def start_group(
        self,
        pool: ResourcePool,
        cls_with_args: ClassWithInitArgs,
        *,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        deadlines: Deadlines | None = None,
        detached: bool = False,
    ) -> WorkerGroup:
        if detached:
            raise UserError("the local backend has no detached groups: its processes end with the driver; use ray")
        role = role_name(cls_with_args, name)
        if pool.world_size == 1 and self._in_process:
            transport: Transport = InProcess(cls_with_args, role, env or {}, timeout_s, deadlines or {})
        else:
            from podium.protocol.local_processes import Processes

            transport = Processes(
                cls_with_args, role, pool.world_size, env or {}, (deadlines or {}).get(START, NO_DEADLINE)
            )
        self._transports.append(transport)
        return make_group(transport, cls_with_args, role, timeout_s, deadlines)

    def attach_group(self, name: str, *, timeout_s: float | None = None) -> WorkerGroup:
        raise UserError(f"the local backend has no detached groups, so none named {name!r}; use ray")

    def shutdown(self) -> None:
        for transport in reversed(self._transports):
            transport.close()
        self._transports.clear()
