"""The driver's side: connects worker groups with each other, and makes them sync."""

from collections.abc import Sequence
from itertools import accumulate, chain

from podium.protocol import WorkerGroup
from podium.protocol.future import get_all
from podium.workers.weight_sync.connection import choose_transport
from podium.workers.weight_sync.transport.base import SyncReport, SyncSettings


def connect_groups(groups: Sequence[WorkerGroup], transport: str, settings: SyncSettings) -> str:
    """Connects all ranks of groups whose roles are ends of a sync: the actor, and the rollout where it is apart.

    Args:
        transport: a name, or ``auto``.

    Returns:
        The name of the transport.

    Raises:
        UserError: they cannot be connected so, or do not hold the same tensors.
    """
    ends = list(chain.from_iterable(get_all([group.sync_endpoint() for group in groups])))
    name = choose_transport(transport, [end.place for end in ends])
    firsts = accumulate((group.world_size for group in groups), initial=0)
    get_all([group.connect_sync(name, ends, first, settings) for group, first in zip(groups, firsts, strict=False)])
    return name


def sync_groups(groups: Sequence[WorkerGroup], version: int) -> list[SyncReport]:
    """One version, by one call to each process; a report from each.

    Raises:
        WorkerError: the first failure, at once; the others may still be waiting for the rank that failed.
    """
    return list(chain.from_iterable(get_all([group.sync_weights(version) for group in groups])))
