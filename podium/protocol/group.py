"""``WorkerGroup``: the driver's side of a set of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from podium.protocol.deadline import Deadline, Deadlines, deadline_of
from podium.protocol.dispatch import Execute, MethodSpec, registered_methods
from podium.protocol.errors import WorkerDied, WorkerTimeout
from podium.protocol.future import DataProtoFuture, Future, Handle, gather
from podium.protocol.host import MESH_QUERY, PING
from podium.utils.errors import UserError


class ClassWithInitArgs:
    """A class and the arguments its instances are made with, in the workers.

    Raises:
        UserError: a registered method has a name that WorkerGroup itself uses.
    """

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        taken = sorted(name for name in registered_methods(cls) if name in dir(WorkerGroup))
        if taken:
            raise UserError(f"{cls.__name__} registers {taken}, which WorkerGroup needs for itself; rename them")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    @property
    def roles(self) -> dict[str, ClassWithInitArgs] | None:
        """The roles of a colocated class by name; None for a single class."""
        return None

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


Call = tuple[tuple[Any, ...], dict[str, Any], bool]
"""Arguments, keyword arguments, and whether the value is to be sent back."""


class Transport(ABC):
    """The processes behind a group."""

    world_size: int

    @abstractmethod
    def submit(self, role: str, method: str, calls: Sequence[Call]) -> list[Handle]:
        """Start ``calls[i]`` on rank i, for as many ranks as there are calls."""

    @abstractmethod
    def close(self) -> None:
        """End the processes; idempotent."""

    @abstractmethod
    def restart(self) -> None:
        """End the processes and start new ones in their places, which construct the same classes again."""

    def alive(self) -> list[bool]:
        """Whether each rank's process is there."""
        return [True] * self.world_size


class WorkerGroup:
    """Ranks that run one role. Registered methods of the role's class are methods of the group.

    Attributes:
        role: the role's name in errors.
        world_size: number of ranks.
        timeout_s: seconds each call may take (None: no limit); past it, WorkerTimeout names the silent ranks.
        deadlines: of the methods that have one of their own.
    """

    def __init__(
        self, transport: Transport, role: str, cls: type, timeout_s: float | None, deadlines: Deadlines | None = None
    ) -> None:
        self.role, self.cls, self.timeout_s, self.deadlines = role, cls, timeout_s, deadlines or {}
        self._transport = transport
        self._meshes: dict[str, list[tuple[int, bool]]] = {}
        self._methods = registered_methods(cls)
        self._calls = {name: self._bind(name, spec) for name, spec in self._methods.items()}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        calls = self.__dict__.get("_calls", {})
        if name in calls:
            return calls[name]
        raise AttributeError(
            f"{self.__dict__.get('role')!r} has no registered method {name!r}; there are {sorted(calls)}"
        )

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._calls]

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run any method of the role on every rank with the same arguments; one value a rank."""
        calls: list[Call] = [(args, kwargs, True)] * self.world_size
        return gather(self._transport.submit(self.role, method, calls), self._deadline(method))

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run any method of the role on rank 0."""
        return gather(self._transport.submit(self.role, method, [(args, kwargs, True)]), self._deadline(method))[0]

    def alive(self) -> list[bool]:
        """Whether each rank's process is there."""
        return self._transport.alive()

    def answers(self, timeout_s: float) -> bool:
        """Whether every rank is there and answers within so many seconds."""
        calls: list[Call] = [((), {}, False)] * self.world_size
        try:
            gather(self._transport.submit(self.role, PING, calls), Deadline(timeout_s))
        except (WorkerDied, WorkerTimeout):
            return False
        return True

    def shutdown(self) -> None:
        """End the ranks' processes (of every role colocated in them); idempotent."""
        self._transport.close()

    def restart(self) -> None:
        """End the ranks' processes and start new ones, for every role colocated in them.

        Each role is constructed again as it was at the start; what else was called on it is to be called again.

        Raises:
            UserError, WorkerError: as ``Backend.start_group``; or the ranks are in the driver's process.
        """
        self._transport.restart()
        self._meshes.clear()

    def _deadline(self, method: str) -> Deadline:
        return deadline_of(method, self.deadlines, self.timeout_s)

    def _bind(self, method: str, spec: MethodSpec) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._invoke(method, spec, args, kwargs)

        call.__name__ = method
        call.__doc__ = getattr(self.cls, method).__doc__
        return call

    def _invoke(self, method: str, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = spec.mode
        n = self.world_size
        split_args, split_kwargs = mode.dispatch_fn(self, *args, **kwargs)
        for value in [*split_args, *split_kwargs.values()]:
            if not isinstance(value, list | tuple) or len(value) != n:
                raise ValueError(
                    f"dispatch_fn of {mode.name} must give each argument as a list with one value for {n} ranks"
                )
        answering = range(n) if mode.collect_ranks is None else set(mode.collect_ranks(self))
        calls: list[Call] = [
            (tuple(a[r] for a in split_args), {k: v[r] for k, v in split_kwargs.items()}, r in answering)
            for r in range(n)
        ]
        if mode.rank_zero or spec.execute is Execute.RANK_ZERO:
            handles = self._transport.submit(self.role, method, calls[:1])
            return self._answer(spec, handles, self._deadline(method), lambda outputs: outputs[0])
        handles = self._transport.submit(self.role, method, calls)
        if not spec.blocking and mode.gives_data_proto:
            order = range(n) if mode.collect_ranks is None else mode.collect_ranks(self)
            return DataProtoFuture([handles[r] for r in order], self._deadline(method))
        return self._answer(spec, handles, self._deadline(method), lambda outputs: mode.collect_fn(self, outputs))

    def _answer(
        self, spec: MethodSpec, handles: list[Handle], deadline: Deadline, finish: Callable[[list[Any]], Any]
    ) -> Any:
        if not spec.blocking:
            return Future(handles, finish, deadline)
        return finish(gather(handles, deadline))

    def _mesh_info(self, mesh: str) -> list[tuple[int, bool]]:
        if mesh not in self._meshes:
            self._meshes[mesh] = self.execute_all(MESH_QUERY, mesh)
        return self._meshes[mesh]


class ColocatedWorkerGroup(WorkerGroup):
    """Ranks that run several roles each. ``spawn`` gives a group a role; ``<role>_<method>`` works on this one too."""

    def __init__(
        self,
        transport: Transport,
        roles: dict[str, ClassWithInitArgs],
        timeout_s: float | None,
        deadlines: Deadlines | None = None,
    ) -> None:
        super().__init__(transport, next(iter(roles)), object, timeout_s, deadlines)
        self._groups = {
            role: WorkerGroup(transport, role, spec.cls, timeout_s, deadlines) for role, spec in roles.items()
        }
        self._calls = {f"{r}_{name}": fn for r, group in self._groups.items() for name, fn in group._calls.items()}

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """A group for each named role, all over the same processes.

        Raises:
            UserError: a role that is not colocated here.
        """
        missing = [r for r in prefix_set if r not in self._groups]
        if missing:
            raise UserError(f"no role(s) {missing} in this group; there are {list(self._groups)}")
        return {role: self._groups[role] for role in prefix_set}


def make_group(
    transport: Transport,
    spec: ClassWithInitArgs,
    role: str,
    timeout_s: float | None,
    deadlines: Deadlines | None = None,
) -> WorkerGroup:
    """The group for ``spec``, colocated or not."""
    if spec.roles is not None:
        return ColocatedWorkerGroup(transport, spec.roles, timeout_s, deadlines)
    return WorkerGroup(transport, role, spec.cls, timeout_s, deadlines)


__all__ = ["Call", "ClassWithInitArgs", "ColocatedWorkerGroup", "Transport", "WorkerGroup", "make_group"]
