"""Backends: who starts the processes of a worker group."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from podium.protocol.deadline import Deadlines
from podium.protocol.group import ClassWithInitArgs, WorkerGroup
from podium.protocol.resource import ResourcePool
from podium.utils.errors import UserError


class Backend(ABC):
    """Starts worker groups and ends them. A context manager: leaving it shuts down."""

    @abstractmethod
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
        """Start one process a slot of ``pool``, all at the same time, and construct the class (or its roles) in each.

        Args:
            pool: where the ranks go.
            cls_with_args: what each rank constructs.
            env: environment variables of the processes, there before torch is imported.
            name: the role's name in errors and logs (default: the class's name).
            timeout_s: seconds a call on the group may take; past it, an error names the role, method and silent ranks.
            deadlines: of methods that have one of their own, and under ``__init__`` that of the constructors.
            detached: the group outlives the driver and is found again by ``attach_group(name)`` (Ray only).

        Raises:
            UserError: the resources are not there, or a constructor raised UserError.
            WorkerError: a constructor raised, or a process died.
            WorkerTimeout: constructors that did not end in time.
        """

    @abstractmethod
    def attach_group(self, name: str, *, timeout_s: float | None = None) -> WorkerGroup:
        """The detached group that some driver started under ``name``.

        Raises:
            UserError: there is none.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End every group that is not detached, and what the backend itself started; idempotent."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def make_backend(kind: str, **options: Any) -> Backend:
    """``"local"``: one rank in this process, several in processes of its own. ``"ray"``: a Ray cluster.

    Options of ``"local"``: ``in_process`` (see LocalBackend).
    Options of ``"ray"``: ``num_cpus``, ``placement_timeout_s``, ``start_timeout_s`` (see RayBackend).

    Raises:
        UserError: another kind, an unknown option, or Ray is not installed.
    """
    try:
        if kind == "local":
            from podium.protocol.local import LocalBackend

            return LocalBackend(**options)
        if kind == "ray":
            return _ray_backend()(**options)
    except TypeError as e:
        raise UserError(f"backend {kind!r}: {e}") from e
    raise UserError(f"backend {kind!r}: expected 'local' or 'ray'")


def _ray_backend() -> Any:
    try:
        from podium.protocol.ray import RayBackend
    except ImportError as e:
        raise UserError(f"the ray backend needs the package ray ({e}); install it or use the local backend") from e
    return RayBackend


def role_name(spec: ClassWithInitArgs, name: str | None) -> str:
    """The name a group goes by in messages."""
    return name or ("+".join(spec.roles) if spec.roles is not None else spec.cls.__name__)


def free_port() -> int:
    """A TCP port nobody listens on at the moment."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
