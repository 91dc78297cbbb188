"""The ray backend: ranks are actors in a placement group. The only module that imports ray."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Loopback only, where we start Ray ourselves; it must be set before ray is imported.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Failures are reported by gather; those of a call nobody waits for any more are no news.
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tensordict import TensorDict

from podium.protocol.backend import Backend, role_name
from podium.protocol.data import DataProto
from podium.protocol.deadline import NO_DEADLINE, START, Deadline, Deadlines
from podium.protocol.dispatch import registered_methods
from podium.protocol.errors import WorkerDied, WorkerError, died, timed_out
from podium.protocol.exit_codes import ProcessWatch, start_time
from podium.protocol.future import Handle, gather
from podium.protocol.group import Call, ClassWithInitArgs, Transport, WorkerGroup, make_group
from podium.protocol.host import RoleHost, portable
from podium.protocol.placement import Placements
from podium.protocol.resource import ResourcePool
from podium.protocol.worker import ProcessContext
from podium.utils.errors import UserError
from podium.utils.ports import release_port, reserve_port
from podium.utils.process_tree import subreaper

NAMESPACE = "podium"
_GRACE_S = 0.3  # see local_processes
_EXIT_S = 2.0
_CONNECT_S = 10.0


@dataclass(frozen=True)
class _Where:
    """Where a rank's process is."""

    node: str
    address: str
    port: int
    pid: int
    start_ticks: int
    logs: tuple[str, ...]


@dataclass(frozen=True)
class _Shared:
    """An argument that several ranks read from one object in the store; each takes a copy, to write to as it likes."""

    ref: Any

    def own(self) -> Any:
        value = ray.get(self.ref)
        return value.select(deepcopy=True) if isinstance(value, DataProto) else value.clone()


class _Actor:
    """One rank: the process that holds its roles."""

    def __init__(self, label: str, rank: int, about: bytes) -> None:
        self._label, self._about = f"{label} rank {rank}", about
        self._host: RoleHost | None = None
        # A group of its own, so that what the roles start can be ended with it.
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()

    def __repr__(self) -> str:
        return self._label

    def where(self) -> _Where:
        logs = tuple(p for fd in (1, 2) if os.path.isfile(p := os.path.realpath(f"/proc/self/fd/{fd}")))
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        port = reserve_port(address, "world")
        return _Where(context.get_node_id(), address, port, os.getpid(), start_time(os.getpid()), logs)

    def about(self) -> bytes:
        return self._about

    def construct(self, context: ProcessContext, roles: bytes) -> None:
        os.environ.update(context.env())  # before the user's modules are imported
        if context.rank != 0:
            release_port("world")
        self._host = RoleHost(context)
        try:
            self._host.construct(ray.cloudpickle.loads(roles))
        except (WorkerError, UserError) as e:
            raise portable(e) from None

    def call(self, what: list[Any]) -> Any:
        role, method, answer, *arguments = what
        args, kwargs = arguments or ((), {})
        assert self._host is not None, "call before construct"
        try:
            args = tuple(a.own() if isinstance(a, _Shared) else a for a in args)
            kwargs = {k: v.own() if isinstance(v, _Shared) else v for k, v in kwargs.items()}
            return self._host.call(role, method, args, kwargs, answer)
        except (WorkerError, UserError) as e:
            raise portable(e) from None

    def exit(self) -> None:
        """End what the roles started, then this process."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGTERM)
        ray.actor.exit_actor()


def _actor_class(spec: ClassWithInitArgs, role: str) -> type[_Actor]:
    """``_Actor`` with a method of its own for every registered one, for calls without arguments.

    Ray sends an empty call in four fifths of the time of one that has to say what it calls.
    """

    def bare(role: str, method: str) -> Callable[[_Actor], Any]:
        return lambda self: self.call([role, method, True])

    roles = spec.roles if spec.roles is not None else {role: spec}
    names = [(r, method) for r, each in roles.items() for method in registered_methods(each.cls)]
    return type(_Actor.__name__, (_Actor,), {f"{r}.{method}": bare(r, method) for r, method in names})


def _die_with(raylet: int) -> None:
    """End this process and what it started when the raylet is gone, as it is when the driver was killed."""
    while os.getppid() == raylet:
        time.sleep(1.0)
    with contextlib.suppress(OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


_watches: dict[tuple[str, int], ProcessWatch] = {}


class RayHandle(Handle):
    """One rank's answer in the object store; passed to a worker, the worker reads it there."""

    def __init__(self, ref: Any, role: str, rank: int, method: str, where: _Where | None) -> None:
        self.ref, self.role, self.rank, self.method, self.where = ref, role, rank, method, where

    @classmethod
    def gather(cls, handles: Sequence[Any], timeout_s: float | None) -> list[Any]:
        refs = [h.ref for h in handles]
        try:
            # Raises the first failure to arrive; it does not wait for the others.
            return list(ray.get(refs, timeout=timeout_s))
        except GetTimeoutError:
            ready = set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])
            silent = [(h.role, h.rank) for h in handles if h.ref not in ready]
            raise timed_out(handles[0].method, silent, timeout_s or 0.0) from None
        except RayError as e:
            raise _failure(handles, e) from None

    @classmethod
    def ready(cls, handles: Sequence[Any]) -> bool:
        refs = [h.ref for h in handles]
        return len(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]) == len(refs)


def _failure(handles: Sequence[RayHandle], error: RayError) -> BaseException:
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    if isinstance(cause, UserError):
        return cause
    # A death breaks the others' collectives: report the death, not what it broke.
    refs = [h.ref for h in handles]
    ready = set(ray.wait(refs, num_returns=len(refs), timeout=_GRACE_S, fetch_local=False)[0])
    for h in (h for h in handles if h.ref in ready):
        try:
            ray.get(h.ref, timeout=1.0)
        except RayActorError as e:
            return _death(h, e)
        except RayError:
            continue
    if isinstance(cause, WorkerError):
        return cause
    first = handles[0]
    return WorkerError(f"{first.role}.{first.method} failed: {error}", role=first.role, method=first.method)


def _death(handle: RayHandle, error: RayActorError) -> WorkerDied:
    code, lines = None, []
    if handle.where is not None:
        watch = _watches.get((handle.where.node, handle.where.pid))
        code = watch.exit_code(2.0) if watch is not None else None
        lines = _last_lines(handle.where.logs)
    detail = "" if code is not None else "Ray says: " + " ".join(str(error).split())
    return died(handle.role, handle.rank, handle.method, code, lines, detail)


def _last_lines(logs: Sequence[str], count: int = 20) -> list[str]:
    """The last lines of a rank's log files, where they are on this machine."""
    lines: list[str] = []
    for path in logs:
        with contextlib.suppress(OSError), open(path, errors="replace") as f:
            lines += [line for line in f.read()[-16384:].splitlines() if line and not line.startswith(":")]
    return lines[-count:]


_Started = tuple[list[Any], list[_Where]]
"""The actors of a group, and where they are."""


class Actors(Transport):
    """The actors of one group."""

    def __init__(self, start: Callable[[], _Started], on_close: Callable[[], None] | None = None) -> None:
        self._start, self._on_close = start, on_close
        self._begin()
        self.world_size = len(self._actors)

    def _begin(self) -> None:
        self._actors, self._wheres = self._start()
        for where in self._wheres:
            _watches[where.node, where.pid] = ProcessWatch(where.pid, where.start_ticks)

    def restart(self) -> None:
        self._end()
        self._begin()

    def submit(self, role: str, method: str, calls: Sequence[Call]) -> list[Handle]:
        shared = _share(calls) if len(calls) > 1 else {}
        handles: list[Handle] = []
        for rank, (args, kwargs, answer) in enumerate(calls):
            actor = self._actors[rank]
            if args or kwargs:
                if shared:
                    args = tuple(shared.get(id(a), a) for a in args)
                    kwargs = {k: shared.get(id(v), v) for k, v in kwargs.items()}
                # One argument, as Ray serialises each by itself.
                ref = actor.call.remote([role, method, answer, args, kwargs])
            elif answer and (bare := getattr(actor, f"{role}.{method}", None)) is not None:
                ref = bare.remote()
            else:
                ref = actor.call.remote([role, method, answer])
            handles.append(RayHandle(ref, role, rank, method, self._wheres[rank]))
        return handles

    def alive(self) -> list[bool]:
        return [not _watches[w.node, w.pid].ended() for w in self._wheres]

    def close(self) -> None:
        if self._actors:
            self._end()
            if self._on_close is not None:
                self._on_close()

    def _end(self) -> None:
        actors, self._actors = self._actors, []
        if not actors or not ray.is_initialized():
            return
        exits = [a.exit.remote() for a in actors]
        # exit_actor fails its own call; one that is still busy after this is killed.
        with contextlib.suppress(RayError):
            ray.wait(exits, num_returns=len(exits), timeout=_EXIT_S)
        for actor in actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)
        for where in self._wheres:
            watch = _watches.pop((where.node, where.pid), None)
            if watch is not None:
                if watch.ended(_EXIT_S) is False:  # stopped, it does not hear Ray
                    watch.kill()
                if watch.ended(_EXIT_S):  # on this machine: end what it started, too
                    with contextlib.suppress(OSError):
                        os.killpg(where.pid, signal.SIGKILL)
                watch.close()
        self._wheres = []


def _share(calls: Sequence[Call]) -> dict[int, _Shared]:
    """Batches that go to several ranks, put into the store once."""
    batches = [
        v for args, kwargs, _ in calls for v in (*args, *kwargs.values()) if isinstance(v, DataProto | TensorDict)
    ]
    counts = Counter(map(id, batches))
    return {id(v): _Shared(ray.put(v)) for v in {id(v): v for v in batches}.values() if counts[id(v)] > 1}


class RayBackend(Backend):
    """Ranks on a Ray cluster.

    Args:
        num_cpus: logical CPUs of the Ray that is started here (default: the machine's).
        address: the cluster to join (default: ``RAY_ADDRESS``; where that is not set, Ray is started on this machine,
            on the loopback address, and stopped by ``shutdown``). A Ray that is initialised already is used as it is.
        placement_timeout_s: how long to wait for resources that the cluster has but others hold at the moment.
        start_timeout_s: how long the ranks' processes may take to start, constructors not included.
    """

    def __init__(
        self,
        num_cpus: float | None = None,
        address: str | None = None,
        placement_timeout_s: float = 30.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._transports: list[Actors] = []
        self._started = not ray.is_initialized()
        self._reaper: subprocess.Popen[bytes] | None = None
        if self._started:
            address = address or os.environ.get("RAY_ADDRESS") or "local"
            own: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False} if address == "local" else {}
            self._reaper = _start_reaper() if address == "local" else None
            with subreaper():  # what Ray's processes started stays in this process's tree when they end
                try:
                    _init(address, own)
                except BaseException:  # Ctrl-C: Ray ends its processes then, but not those that they have started
                    if self._reaper is not None:
                        self._reaper.communicate()
                    raise
        self._placements = Placements(placement_timeout_s)

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
        if detached and not name:
            raise UserError("a detached group needs a name to be found again by")
        role = role_name(cls_with_args, name)
        bundles, release = self._placements.acquire(pool, role, detached)
        about = ray.cloudpickle.dumps((cls_with_args, role, pool.world_size))
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        common: dict[str, Any] = {
            "num_cpus": pool.cpus_per_rank,
            "num_gpus": 1 / pool.max_colocate_count if pool.use_gpu else 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": {"PYTHONPATH": path, **(env or {})}},
        }

        def start() -> _Started:
            actors: list[Any] = []
            remote = ray.remote(_actor_class(cls_with_args, role))
            try:
                for rank, (group, bundle) in enumerate(bundles):
                    options = dict(common, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle))
                    if detached:
                        options |= {"name": f"{name}:{rank}", "namespace": NAMESPACE, "lifetime": "detached"}
                    actors.append(remote.options(**options).remote(role, rank, about))
                return actors, self._construct(actors, cls_with_args, role, (deadlines or {}).get(START, NO_DEADLINE))
            except BaseException as e:
                for actor in actors:
                    with contextlib.suppress(RayError, ValueError):
                        ray.kill(actor)
                release()
                if isinstance(e, ValueError) and detached and "name" in str(e):
                    text = f"a detached group named {name!r} is there already: attach to it, or end it"
                    raise UserError(text) from None
                raise

        transport = Actors(start, release)
        if not detached:
            self._transports.append(transport)
        return make_group(transport, cls_with_args, role, timeout_s, deadlines)

    def _construct(self, actors: list[Any], spec: ClassWithInitArgs, role: str, deadline: Deadline) -> list[_Where]:
        starts = [RayHandle(a.where.remote(), role, rank, "start", None) for rank, a in enumerate(actors)]
        wheres: list[_Where] = RayHandle.gather(starts, self._start_timeout_s)
        on_node = Counter(w.node for w in wheres)
        payload = ray.put(ray.cloudpickle.dumps(spec.roles if spec.roles is not None else {role: spec}))
        before: Counter[str] = Counter()
        handles = []
        for rank, (actor, where) in enumerate(zip(actors, wheres, strict=True)):
            context = ProcessContext(
                rank, len(actors), before[where.node], on_node[where.node], wheres[0].address, wheres[0].port
            )
            before[where.node] += 1
            handles.append(RayHandle(actor.construct.remote(context, payload), role, rank, "__init__", where))
        gather(handles, deadline)
        return wheres

    def attach_group(self, name: str, *, timeout_s: float | None = None) -> WorkerGroup:
        try:
            first = ray.get_actor(f"{name}:0", namespace=NAMESPACE)
        except ValueError:
            raise UserError(f"no detached group named {name!r} in this cluster") from None
        about: Any = ray.get(first.about.remote())
        spec, role, world_size = ray.cloudpickle.loads(about)
        actors = [first, *(ray.get_actor(f"{name}:{rank}", namespace=NAMESPACE) for rank in range(1, world_size))]
        wheres = ray.get([a.where.remote() for a in actors])
        return make_group(Actors(lambda: (actors, wheres)), spec, role, timeout_s)

    def shutdown(self) -> None:
        for transport in reversed(self._transports):
            transport.close()
        self._transports.clear()
        if ray.is_initialized():
            self._placements.close()
            if self._started:
                ray.shutdown()
        if self._reaper is not None:
            self._reaper.communicate(b"done")
            self._reaper = None


def _init(address: str, own: Mapping[str, Any]) -> None:
    """Start or join Ray.

    Raises:
        UserError: says which Ray could not be had.
    """
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit() and "://" not in host:
            # Ray itself would look for minutes, and print what means nothing to a user.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=True, **own)
    except Exception as e:  # Ray raises bare Exceptions, too
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        if address == "local":
            advice = "Ray does not start on this machine", "if it is only busy, try again; or trainer.backend=local"
        else:
            advice = f"no Ray answers at {address}", "set RAY_ADDRESS to a cluster's, or unset it to start one here"
        raise UserError(f"{advice[0]} ({reason}): {advice[1]}") from e


def _start_reaper() -> subprocess.Popen[bytes]:
    script = os.path.join(os.path.dirname(__file__), "ray_reaper.py")
    command = [sys.executable, "-S", "-E", script, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
