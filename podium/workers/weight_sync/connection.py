"""From what every process says of itself to the link that connects it with the others."""

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from podium.utils.device import device, is_cuda
from podium.utils.errors import UserError
from podium.utils.memory_buffer import FlatStage
from podium.utils.piece import Piece
from podium.utils.ports import reserve_port
from podium.workers.rollout.base import RolloutEngine
from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.plan import ReshardPlan
from podium.workers.weight_sync.transport import get_transport
from podium.workers.weight_sync.transport.base import Link, Place, SyncSettings, Transport


@dataclass(frozen=True)
class Endpoint:
    """What a process tells the others, through the driver, before the first sync."""

    place: Place
    sources: tuple[Box, ...]
    """What its trainer holds."""
    destinations: tuple[Box, ...]
    """What its rollout engine holds."""
    rendezvous: tuple[str, int]
    """Address of rank 0 of its group, and a port that this process holds."""
    secret: bytes


def describe(
    label: str,
    source: Callable[[], list[Piece]] | None,
    engine: RolloutEngine | None,
    stage: Callable[[], FlatStage | None] | None = None,
) -> Endpoint:
    """This process as an endpoint."""
    sources = tuple(map(Box.of, source())) if source is not None else ()
    destinations = tuple(map(Box.of, engine.pieces())) if engine is not None else ()
    flat = stage() if stage is not None else None
    pipeline = flat.ranks if flat is not None else ()
    place = Place(label, _machine(), _device_uuid(), source is not None, engine is not None, pipeline)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    rendezvous = host, reserve_port(host, "weight sync")
    return Endpoint(place, sources, destinations, rendezvous, secrets.token_bytes(16))


def _machine() -> str:
    """The same text in processes that share memory: machine, boot, and the /dev/shm of the container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shm = Path("/dev/shm")
    return "/".join(
        [
            socket.gethostname(),
            boot.read_text(encoding="ascii").strip() if boot.exists() else "",
            str(os.stat(shm).st_dev) if shm.exists() else "",
        ]
    )


def _device_uuid() -> str:
    return str(torch.cuda.get_device_properties(device()).uuid) if is_cuda() else "cpu"


def make_plan(endpoints: Sequence[Endpoint]) -> ReshardPlan:
    """What has to travel between the endpoints, which are numbered as they come.

    Raises:
        UserError: the trainer has tensors that the rollout does not know, or the other way round.
    """
    known = {box.name for endpoint in endpoints for box in endpoint.destinations}
    surplus = sorted({box.name for endpoint in endpoints for box in endpoint.sources} - known)
    if surplus:
        raise UserError(
            f"weight sync: the rollout has no place for {len(surplus)} of the trainer's tensors, the first {surplus[0]}"
        )
    return ReshardPlan.from_pieces(
        {number: endpoint.sources for number, endpoint in enumerate(endpoints) if endpoint.sources},
        {number: endpoint.destinations for number, endpoint in enumerate(endpoints) if endpoint.destinations},
    )


def choose_transport(requested: str, places: Sequence[Place]) -> str:
    """The transport for processes in these places; checks one that was asked for by name.

    Raises:
        UserError: there is none of that name, or it cannot connect them.
    """
    if requested != "auto":
        get_transport(requested).check(places)
        return requested
    if all(place.is_source and place.is_destination for place in places):
        return "colocated"
    sources = [place for place in places if place.is_source]
    paired = all(any(place.shares_device(source) for source in sources) for place in places if place.is_destination)
    return "ipc" if paired else "broadcast"


def connect(
    transport: str,
    endpoints: Sequence[Endpoint],
    rank: int,
    settings: SyncSettings,
    source: Callable[[], list[Piece]] | None,
    engine: RolloutEngine | None,
    stage: Callable[[], FlatStage | None] | None = None,
) -> Transport:
    """Connects this process, number `rank`, with the others, which do the same at the same time."""
    places, chosen = [endpoint.place for endpoint in endpoints], get_transport(transport)
    held = chosen.held(places, [endpoint.sources for endpoint in endpoints])
    plan = make_plan([replace(end, sources=tuple(boxes)) for end, boxes in zip(endpoints, held, strict=True)])
    first = endpoints[0]
    link = Link(plan, rank, places, first.rendezvous, first.secret, settings, source, engine, stage)
    connection = chosen(link)
    connection.connect()
    return connection
