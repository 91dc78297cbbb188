"""Actor and rollout share their processes: each copies what it has already, and the others send it the rest."""

from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist

from podium.utils.errors import UserError
from podium.workers.weight_sync.transport.base import TRANSPORT_KEY, Place, Sync, Transport
from podium.workers.weight_sync.transport.exchange import Exchange, GroupCarrier


class ColocatedTransport(Transport):
    """Copies within a rank, straight into the engine's parameters, and sends packed buckets between ranks.

    The ranks are those of the default process group.
    """

    name: ClassVar[str] = "colocated"

    @classmethod
    def check(cls, places: Sequence[Place]) -> None:
        if not all(place.is_source and place.is_destination for place in places):
            raise UserError(f"{TRANSPORT_KEY}=colocated: the rollout has processes of its own; use ipc or broadcast")

    def connect(self) -> None:
        # A group of its own: after a sync that failed, nothing of it is left in the trainer's.
        timeout = timedelta(seconds=self.link.settings.timeout_s)
        group = dist.new_group(timeout=timeout) if len(self.link.places) > 1 else None
        self._exchange = Exchange(self.link, GroupCarrier(self.link, group))

    def transfer(self, sync: Sync) -> None:
        self._exchange(sync)

    def close(self) -> None:
        self._exchange.close()
