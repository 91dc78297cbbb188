"""Messages over TCP: in order, whole, between those that belong here; whoever is gone is named."""

import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from podium.protocol.backend import free_port
from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.plan import ReshardPlan
from podium.workers.weight_sync.transport import wires
from podium.workers.weight_sync.transport.base import Link, Place, Sync, SyncSettings, WeightSyncError
from podium.workers.weight_sync.transport.wires import Wires

SIZE = 3


def links(timeout_s: float) -> list[Link]:
    """Processes of which each has a row that the two others want."""
    held = [Box("w", (rank, 0), (rank + 1, 4), "float32") for rank in range(SIZE)]
    whole = [Box("w", (0, 0), (SIZE, 4), "float32")]
    plan = ReshardPlan.from_pieces({r: [box] for r, box in enumerate(held)}, dict.fromkeys(range(SIZE), whole))
    places = [Place(f"rank {rank}", "", "cpu", True, True) for rank in range(SIZE)]
    port, settings = free_port(), SyncSettings(timeout_s=timeout_s)
    return [Link(plan, rank, places, ("127.0.0.1", port), b"secret", settings) for rank in range(SIZE)]


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def connected() -> Iterator[Callable[[float], list[tuple[Sync, Wires]]]]:
    with ExitStack() as stack:

        def connect(timeout_s: float) -> list[tuple[Sync, Wires]]:
            ends = links(timeout_s)
            carriers = in_threads([lambda link=link: Wires(link) for link in ends])
            for carrier in carriers:
                stack.callback(carrier.close)
            return [(Sync(link, 7, "broadcast"), carrier) for link, carrier in zip(ends, carriers, strict=True)]

        yield connect


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_any_size_arrive_in_order(connected: Callable[[float], Any], seed: int):
    """More than the system's buffers hold, in both directions of every pair at once, several rounds under way."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(SIZE) for b in range(SIZE) if a != b]
    sizes = {pair: [[draw.choice([0, 1, 17, 4096, 1 << 20]) for _ in range(90)] for _ in range(3)] for pair in pairs}
    sent = {
        pair: [[torch.randint(256, (size,), dtype=torch.uint8) for size in row] for row in rows]
        for pair, rows in sizes.items()
    }
    came = {pair: [[torch.empty_like(each) for each in row] for row in rows] for pair, rows in sent.items()}

    def run(rank: int, sync: Sync, carrier: Wires) -> None:
        running = [
            carrier.start(
                sync,
                [(m, a) for (a, b), rows in came.items() if b == rank for m in rows[step]],
                [(m, b) for (a, b), rows in sent.items() if a == rank for m in rows[step]],
            )
            for step in range(3)
        ]
        for step, each in enumerate(running):
            carrier.finish(sync, each)
            for (a, b), rows in came.items():
                assert b != rank or all(map(torch.equal, rows[step], sent[a, b][step]))

    in_threads([lambda rank=rank, end=end: run(rank, *end) for rank, end in enumerate(connected(30.0))])


def test_whoever_is_gone_is_named_at_once(connected: Callable[[float], Any]):
    (sync, carrier), (_, gone), _ = connected(30.0)
    gone.close()
    running = carrier.start(sync, [(torch.empty(8, dtype=torch.uint8), peer) for peer in (1, 2)], [])
    with pytest.raises(
        WeightSyncError, match="weight sync 7: rank 0: receiving from rank 1: the connection was closed"
    ):
        carrier.finish(sync, running)


def test_whoever_is_late_is_named_at_the_deadline(connected: Callable[[float], Any]):
    (sync, carrier), *_ = connected(5.0)
    sync.deadline._until -= 4.9
    running = carrier.start(sync, [(torch.empty(8, dtype=torch.uint8), 2)], [])
    with pytest.raises(WeightSyncError, match="weight sync 7: rank 0: receiving from rank 2: not done within 5 s"):
        carrier.finish(sync, running)


def test_strangers_are_not_let_in(monkeypatch: pytest.MonkeyPatch, connected: Callable[[float], Any]):
    """One hangs up, one says something else, and one says nothing: the others meet all the same."""
    monkeypatch.setattr(wires, "_GREETING_S", 1)
    create, strangers = socket.create_server, []

    def create_server(*args: Any, **kwargs: Any) -> socket.socket:
        door = create(*args, **kwargs)
        if args[0][1] == 0:
            strangers.extend(socket.create_connection(door.getsockname()) for _ in range(3))
            strangers[-3].close()
            strangers[-2].sendall(b"\0\0\0\x05hello" * 9)
        return door

    monkeypatch.setattr(wires.socket, "create_server", create_server)
    ends = connected(30.0)
    assert len(strangers) == 3 * SIZE

    def run(rank: int, sync: Sync, carrier: Wires) -> list[int]:
        heard = [torch.zeros(1, dtype=torch.int64) for _ in range(SIZE)]
        others = [peer for peer in range(SIZE) if peer != rank]
        mine = torch.tensor([rank])
        carrier.finish(sync, carrier.start(sync, [(heard[p], p) for p in others], [(mine, p) for p in others]))
        return [int(heard[peer]) for peer in others]

    heard = in_threads([lambda rank=rank, end=end: run(rank, *end) for rank, end in enumerate(ends)])
    assert heard == [[1, 2], [0, 2], [0, 1]]
