"""Weights on their way through host memory, and the groups of processes that they travel between."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from podium.utils.device import device, is_cuda, tcp_store
from podium.workers.weight_sync.lane import Lane
from podium.workers.weight_sync.transport.base import Link, Sync, make_buffer


def pack_to_host(sync: Sync, lane: Lane, index: int, frame: torch.Tensor) -> int:
    """Fills `frame`, as long as the bucket and in host memory, from the trainer's memory; returns its checksum."""
    if not is_cuda():
        return sync.pack(lane, index, frame)
    packed = make_buffer(len(frame))  # one copy to the host, not one for each tensor
    checksum = sync.pack(lane, index, packed)
    frame.copy_(packed)
    return checksum


def deliver_from_host(sync: Sync, lane: Lane, index: int, frame: torch.Tensor, checksum: int) -> None:
    """Writes a bucket that lies in host memory to the engine.

    Raises:
        WeightSyncError: the engine then does not hold what was sent.
    """
    sync.deliver(lane, index, frame.to(device()), checksum)


class HostGroups:
    """gloo groups between processes of a link, which may share no world.

    Processes make them in the same order, each those that it belongs to.
    """

    def __init__(self, link: Link):
        host, port = link.rendezvous
        self._link, self._timeout = link, timedelta(seconds=link.settings.timeout_s)
        self._store = tcp_store(host, port, link.rank == 0, self._timeout)
        self._groups: dict[tuple[int, ...], Any] = {}

    def __call__(self, ranks: Sequence[int]) -> Any:
        """The group of these processes, numbered in this order."""
        ranks = tuple(ranks)
        if ranks not in self._groups:
            store = dist.PrefixStore("-".join(map(str, ranks)), self._store)
            self._groups[ranks] = dist.ProcessGroupGloo(store, ranks.index(self._link.rank), len(ranks), self._timeout)
        return self._groups[ranks]

    def close(self) -> None:
        """Ends the connections."""
        while self._groups:
            self._groups.popitem()[1].shutdown()


def wait(sync: Sync, phase: str, work: Any) -> None:
    """Waits for what a group was asked to do.

    Raises:
        WeightSyncError: it failed, or took too long.
    """
    left = timedelta(seconds=sync.deadline.left(phase))
    try:
        work.wait(left)
    except RuntimeError as error:
        raise sync.deadline.error(phase, str(error).splitlines()[0]) from error
