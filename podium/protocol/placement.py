"""Reserving a pool's slots in a Ray cluster, and saying what is short where that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from podium.protocol.resource import ResourcePool
from podium.utils.errors import UserError


class _Reservation:
    def __init__(self, group: Any, detached: bool) -> None:
        self.group, self.detached, self.users = group, detached, 0


class Placements:
    """One placement group a pool: a bundle a node (so a node's ranks are together), nodes apart."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[ResourcePool, _Reservation] = {}

    def acquire(
        self, pool: ResourcePool, role: str, detached: bool
    ) -> tuple[list[tuple[Any, int]], Callable[[], None]]:
        """The (placement group, bundle) of each of the pool's slots, and what to call when the group has ended.

        Raises:
            UserError: the cluster is too small, too busy, or the slots are taken.
        """
        roots = list(dict.fromkeys(slot.pool for slot in pool.slots))
        counts = [sum(slot.pool is root for slot in pool.slots) for root in roots]
        taken: list[_Reservation] = []
        for root, count in zip(roots, counts, strict=True):
            reservation = self._held.get(root)
            if reservation is None:
                reservation = self._held[root] = _Reservation(self._reserve(root, detached), detached)
            if reservation.users + count > root.world_size * root.max_colocate_count:
                raise UserError(
                    f"pool {root.name!r} has {root.world_size} slots for {root.max_colocate_count} rank(s) each, and "
                    f"{reservation.users} are taken; colocate {role!r} with the roles there, raise max_colocate_count, "
                    "or give it a pool of its own"
                )
            taken.append(reservation)
        for reservation, count in zip(taken, counts, strict=True):
            reservation.users += count
        done = False

        def release() -> None:
            nonlocal done
            if done:
                return
            done = True
            for root, reservation, count in zip(roots, taken, counts, strict=True):
                reservation.users -= count
                if reservation.users == 0 and self._held.get(root) is reservation:
                    del self._held[root]
                    _remove(reservation.group)

        return [(self._held[slot.pool].group, slot.node) for slot in pool.slots], release

    def close(self) -> None:
        """Give back everything that is not detached."""
        for reservation in self._held.values():
            if not reservation.detached:
                _remove(reservation.group)
        self._held.clear()

    def _reserve(self, pool: ResourcePool, detached: bool) -> Any:
        from ray.util.placement_group import placement_group

        _check_size(pool)
        bundles = [_bundle(pool, ranks) for ranks in pool.process_on_nodes]
        strategy = "STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD"
        group = placement_group(bundles, strategy=strategy, lifetime="detached" if detached else None)
        until = time.monotonic() + self._timeout_s
        while not group.wait(timeout_seconds=min(1.0, self._timeout_s)):
            if time.monotonic() >= until:
                message = _short(pool, f"after waiting {self._timeout_s:g} s")
                _remove(group)
                raise UserError(message)
        return group


def _bundle(pool: ResourcePool, ranks: int) -> dict[str, float]:
    # A bundle of nothing is refused, so a pool of 0 CPUs asks for next to nothing.
    bundle = {"CPU": max(pool.cpus_per_rank * pool.max_colocate_count * ranks, 0.001)}
    return bundle | ({"GPU": float(ranks)} if pool.use_gpu else {})


def _check_size(pool: ResourcePool) -> None:
    """Fail at once where no amount of waiting would help."""
    import ray

    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    wanted = sorted((_bundle(pool, ranks) for ranks in pool.process_on_nodes), key=lambda b: b["CPU"])
    for resource in ("CPU", "GPU"):
        have = sorted(n.get(resource, 0.0) for n in nodes)[-len(wanted) :]
        need = [b.get(resource, 0.0) for b in wanted]
        if len(have) < len(need) or any(h < n for h, n in zip(have, need, strict=True)):
            raise UserError(_short(pool, "and never more"))


def _short(pool: ResourcePool, when: str) -> str:
    import ray

    free, total = ray.available_resources(), ray.cluster_resources()
    bundles, nodes = sum(pool.process_on_nodes), len(pool.process_on_nodes)
    cpus = pool.cpus_per_rank * pool.max_colocate_count
    gpu = " and 1 GPU" if pool.use_gpu else ""
    alive = sum(n["Alive"] for n in ray.nodes())
    text = (
        f"resource pool {pool.name!r} needs {bundles} bundles of {cpus:g} CPUs{gpu} on {nodes} node(s), "
        f"the cluster has {free.get('CPU', 0):g} free of {total.get('CPU', 0):g} CPUs"
    )
    if pool.use_gpu:
        text += f", {free.get('GPU', 0):g} free of {total.get('GPU', 0):g} GPUs"
    return f"{text} on {alive} node(s) {when}; use fewer ranks, lower cpus_per_rank, or start Ray with more"


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)
