"""Actor and rollout share nothing: buckets over connections of their own, nccl's or, on a CPU, TCP."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from podium.utils.device import is_cuda, tcp_store
from podium.utils.errors import UserError
from podium.workers.weight_sync.transport.base import TRANSPORT_KEY, Link, Place, Sync, Transport
from podium.workers.weight_sync.transport.exchange import Exchange, GroupCarrier
from podium.workers.weight_sync.transport.wires import Wires


class BroadcastTransport(Transport):
    """Each destination gets every element once, from one of the actor's ranks that hold it."""

    name: ClassVar[str] = "broadcast"

    @classmethod
    def check(cls, places: Sequence[Place]) -> None:
        if any(place.is_source and place.is_destination for place in places):
            raise UserError(f"{TRANSPORT_KEY}=broadcast: actor and rollout share their processes; use colocated")

    def connect(self) -> None:
        carrier = GroupCarrier(self.link, _join(self.link)) if is_cuda() else Wires(self.link)
        self._exchange = Exchange(self.link, carrier)

    def transfer(self, sync: Sync) -> None:
        self._exchange(sync)

    def close(self) -> None:
        self._exchange.close()


def _join(link: Link) -> Any:
    """An nccl group of all the link's processes, whose default groups know nothing of each other."""
    host, port = link.rendezvous
    timeout, size = timedelta(seconds=link.settings.timeout_s), len(link.places)
    store = tcp_store(host, port, link.rank == 0, timeout, size)
    name = f"podium-weight-sync-{port}"
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        link.rank,
        [],
        distributed_c10d.Backend("nccl"),
        dist.PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
