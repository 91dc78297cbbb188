"""The names that code written for verl imports, in its call forms, over the ray backend.

    from podium.protocol import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

Groups of one driver share one backend, started with the first of them (in the Ray that is initialised, else in one of
its own) and ended with ``ray.shutdown`` or the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from podium.protocol.backend import Backend, make_backend
from podium.protocol.group import ClassWithInitArgs, ColocatedWorkerGroup, WorkerGroup
from podium.protocol.resource import ResourcePool
from podium.utils.errors import UserError


class RayResourcePool(ResourcePool):
    """``ResourcePool`` with verl's arguments: a slot reserves one CPU for each of ``max_colocate_count`` groups.

    Args:
        process_on_nodes: ranks on each node.
        use_gpu: reserve one GPU a slot as well.
        name_prefix: the pool's name in messages.
        max_colocate_count: how many groups may share the slots.
        detached: groups on this pool outlive the driver.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] = (1,),
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
    ) -> None:
        super().__init__(process_on_nodes, 1.0, use_gpu, name_prefix, max_colocate_count)
        self.detached = detached


class RayClassWithInitArgs(ClassWithInitArgs):
    """``ClassWithInitArgs`` that also takes a class decorated with ``ray.remote``."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        remote = getattr(cls, "__ray_metadata__", None)
        # Ray keeps the user's own class as an attribute of the class it derives from it.
        super().__init__(cls if remote is None else remote.modified_class.__ray_actor_class__, *args, **kwargs)


class RayWorkerGroup(ColocatedWorkerGroup):
    """A group started by its constructor.

    Args:
        resource_pool: where the ranks go.
        ray_cls_with_init: what each rank constructs, or what ``create_colocated_worker_cls`` gave.
        name_prefix: the group's name in messages, and by which a detached one is found again.
        detached: the group outlives the driver.
        worker_env: environment variables of the ranks.
        bin_pack, device_name: taken for verl's sake; ranks of a node are always together, and what device a worker
            uses is its own matter.

    Raises:
        UserError, WorkerError: as ``Backend.start_group``.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_env: Mapping[str, str] | None = None,
        device_name: str | None = None,
    ) -> None:
        detached = detached or getattr(resource_pool, "detached", False)
        self._adopt(
            _backend().start_group(
                resource_pool, ray_cls_with_init, env=worker_env, name=name_prefix, detached=detached
            ),
            name_prefix,
        )

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
    ) -> RayWorkerGroup:
        """The detached group of this name, or of these ``worker_names``; it knows its class itself.

        Raises:
            UserError: there is none, or no name was given.
        """
        name = worker_names[0].rpartition(":")[0] if worker_names else name_prefix
        if not name:
            raise UserError("from_detached needs the group's name_prefix or its worker_names")
        return cls.__new__(cls)._adopt(_backend().attach_group(name), name)

    @property
    def worker_names(self) -> list[str]:
        """The ranks' names in the cluster, of a detached group."""
        return [f"{self.name_prefix}:{rank}" for rank in range(self.world_size)]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        if "_groups" not in self.__dict__:
            raise UserError(f"{self.role!r} is one role; make the class with create_colocated_worker_cls to spawn")
        return {r: type(self).__new__(type(self))._adopt(g, r) for r, g in super().spawn(prefix_set).items()}

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """``execute_all``."""
        return self.execute_all(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """``execute_rank_zero``."""
        return self.execute_rank_zero(method_name, *args, **kwargs)

    def _adopt(self, group: WorkerGroup, name: str | None) -> RayWorkerGroup:
        self.__dict__.update(group.__dict__)
        self.name_prefix = name
        return self


_held: tuple[str, Backend] | None = None


def _backend() -> Backend:
    """One backend for as long as the driver's Ray lasts."""
    global _held
    if _held is not None and _driver() == _held[0]:
        return _held[1]
    backend = make_backend("ray")
    _held = _driver(), backend
    return backend


def _driver() -> str:
    """The driver's id in the Ray that is initialised; empty where none is."""
    import ray

    return ray.get_runtime_context().get_worker_id() if ray.is_initialized() else ""
