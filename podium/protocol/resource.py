"""Where ranks may run: pools of slots, and which role uses which pool."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.utils.errors import UserError

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Slot:
    """Room for one rank: bundle ``index`` on node ``node`` of the pool that reserves it."""

    pool: ResourcePool
    node: int
    index: int


class ResourcePool:
    """Slots for ranks.

    Args:
        process_on_nodes: ranks on each node: ``[4, 4]`` is eight ranks, four on each of two nodes.
        cpus_per_rank: CPUs reserved for a rank (Ray; the local backend reserves nothing).
        use_gpu: reserve one GPU a slot as well.
        name: for messages.
        max_colocate_count: how many groups may share the slots; each slot reserves that many times ``cpus_per_rank``.

    Raises:
        UserError: no ranks, or negative numbers.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] = (1,),
        cpus_per_rank: float = 1.0,
        use_gpu: bool = False,
        name: str | None = None,
        max_colocate_count: int = 1,
    ) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1:
            raise UserError(f"process_on_nodes must name at least one rank on every node, got {list(process_on_nodes)}")
        if cpus_per_rank < 0 or max_colocate_count < 1:
            raise UserError("cpus_per_rank must not be negative, and max_colocate_count at least 1")
        self.process_on_nodes = list(process_on_nodes)
        self.cpus_per_rank, self.use_gpu, self.max_colocate_count = cpus_per_rank, use_gpu, max_colocate_count
        self.name = name or f"pool_{next(_numbers)}"
        self.slots = [Slot(self, node, i) for node, n in enumerate(self.process_on_nodes) for i in range(n)]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.slots)

    def split(self, sizes: Sequence[int]) -> list[ResourcePool]:
        """Pools over consecutive slots of this one; they reserve nothing more.

        Raises:
            UserError: the sizes do not add up to the world size.
        """
        if sum(sizes) != self.world_size or min(sizes, default=0) < 1:
            raise UserError(f"cannot split pool {self.name!r} of {self.world_size} slots into {list(sizes)}")
        ends = list(itertools.accumulate(sizes))
        parts = [self.slots[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        return [_over(part, f"{self.name}[{i}]") for i, part in enumerate(parts)]

    def __repr__(self) -> str:
        return f"ResourcePool({self.name!r}, {self.process_on_nodes}, cpus_per_rank={self.cpus_per_rank:g})"


def _over(slots: Sequence[Slot], name: str) -> ResourcePool:
    runs = [len(list(run)) for _, run in itertools.groupby(slots, key=lambda s: (id(s.pool), s.node))]
    root = slots[0].pool
    pool = ResourcePool(runs, root.cpus_per_rank, root.use_gpu, name, root.max_colocate_count)
    pool.slots = list(slots)
    return pool


def split_resource_pool(resource_pool: ResourcePool, split_size: int | Sequence[int]) -> list[ResourcePool]:
    """Split into pools of ``split_size`` slots each, or of the sizes given."""
    if isinstance(split_size, int):
        if split_size < 1 or resource_pool.world_size % split_size:
            raise UserError(f"split_size {split_size} does not divide the {resource_pool.world_size} slots")
        return resource_pool.split([split_size] * (resource_pool.world_size // split_size))
    return resource_pool.split(split_size)


def merge_resource_pool(rp1: ResourcePool, rp2: ResourcePool) -> ResourcePool:
    """A pool over the slots of both.

    Raises:
        UserError: they reserve different things a slot.
    """
    a, b = rp1.slots[0].pool, rp2.slots[0].pool
    if (a.cpus_per_rank, a.use_gpu, a.max_colocate_count) != (b.cpus_per_rank, b.use_gpu, b.max_colocate_count):
        raise UserError(f"cannot merge {rp1!r} and {rp2!r}: their slots differ")
    return _over([*rp1.slots, *rp2.slots], f"{rp1.name}+{rp2.name}")


@dataclass
class ResourcePoolManager:
    """Pools by name and the pool of each role.

    Attributes:
        resource_pool_spec: ranks on each node, by pool name.
        mapping: pool name by role.
        cpus_per_rank, use_gpu: as in ResourcePool.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[str, str]
    cpus_per_rank: float = 1.0
    use_gpu: bool = False
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise UserError(
                    f"role {role!r} is mapped to pool {pool!r}; there are {sorted(self.resource_pool_spec)}"
                )

    def create_resource_pool(self) -> None:
        """Make the pools (they reserve nothing until a group starts on them)."""
        for name, ranks in self.resource_pool_spec.items():
            if name not in self.resource_pool_dict:
                pool = ResourcePool(ranks, self.cpus_per_rank, self.use_gpu, name)
                self.resource_pool_dict[name] = pool

    def get_resource_pool(self, role: str) -> ResourcePool:
        """The pool of ``role``.

        Raises:
            UserError: the role is not mapped.
        """
        self.create_resource_pool()
        if role not in self.mapping:
            raise UserError(f"role {role!r} is mapped to no pool; there are {sorted(self.mapping)}")
        return self.resource_pool_dict[self.mapping[role]]

    def roles_by_pool(self) -> dict[str, list[str]]:
        """Roles that share a pool, in the order of ``mapping``: what to colocate."""
        out: dict[str, list[str]] = {}
        for role, pool in self.mapping.items():
            out.setdefault(pool, []).append(role)
        return out


__all__: list[Any] = ["ResourcePool", "ResourcePoolManager", "Slot", "merge_resource_pool", "split_resource_pool"]
