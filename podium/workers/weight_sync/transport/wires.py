"""Messages between processes over TCP connections of their own, from memory to memory.

One call to the system sends, or receives, up to `_AT_ONCE` pieces of memory, so nothing need be packed to keep messages
few; and the caller's own thread does it, where gloo first agrees on each message and hands it to another thread.
"""

import math
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from multiprocessing import AuthenticationError
from typing import Any

import torch

from podium.utils.device import tcp_store
from podium.utils.memory_view import bytes_of
from podium.workers.weight_sync.transport.base import Deadline, Link, Sync
from podium.workers.weight_sync.transport.channel import Channel, ChannelLost

_AT_ONCE = 64  # of the 1024 that Linux takes: enough to make the call cheap, few enough to list anew for each
_GREETING_S = 10  # for a process that is let in; one that belongs here answers at once


class Lost(RuntimeError):
    """The other end is gone."""


class _Way:
    """One direction of a wire: messages, one after the other.

    Args:
        move: moves bytes to or from the pieces of memory it is given, in order; returns how many, 0 at the end.
    """

    def __init__(self, move: Callable[[list[memoryview]], int]):
        self._move = move
        self._left: deque[memoryview] = deque()
        self._queued = self.moved = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    def add(self, messages: Sequence[torch.Tensor]) -> int:
        """Queues messages; they have passed when as many bytes have `moved` as are returned."""
        views = [bytes_of(message) for message in messages]
        self._left += [view for view in views if view]
        self._queued += sum(map(len, views))
        return self._queued

    def advance(self) -> None:
        """Moves what can be moved without waiting.

        Raises:
            Lost: the other end is gone.
        """
        try:
            count = self._move(list(islice(self._left, _AT_ONCE)))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise Lost(str(error)) from error
        if not count:
            raise Lost("the connection was closed")
        self.moved += count
        while self._left and count >= len(self._left[0]):
            count -= len(self._left.popleft())
        if count:
            self._left[0] = self._left[0][count:]


class _Wire:
    """A connection with another process."""

    def __init__(self, stream: socket.socket, label: str):
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream, self.label = stream, label
        self.coming = _Way(lambda memory: stream.recvmsg_into(memory)[0])
        self.going = _Way(stream.sendmsg)
        self.events = 0

    @property
    def wanted(self) -> int:
        """What to wait for."""
        return selectors.EVENT_READ * bool(self.coming) | selectors.EVENT_WRITE * bool(self.going)

    def advance(self, events: int) -> None:
        for event, way, phase in (
            (selectors.EVENT_READ, self.coming, f"receiving from {self.label}"),
            (selectors.EVENT_WRITE, self.going, f"sending to {self.label}"),
        ):
            if events & event and way:
                try:
                    way.advance()
                except Lost as error:
                    raise Lost(phase, str(error)) from error


Running = list[tuple[str, _Way, int]]
"""Messages under way: for each wire and direction, the phase that they are in errors, and when they have passed."""


class Wires:
    """A `Carrier` over TCP, between the processes of this link's lanes. Messages move while one is waited for."""

    def __init__(self, link: Link):
        peers = {number for lane in link.lanes for number in (lane.source, *lane.destinations)} - {link.rank}
        # Those that exchange nothing with this process may with each other: they all read the store.
        self._store = _store(link)
        streams = _meet(link, self._store, sorted(peers))
        self._wires = {number: _Wire(stream, link.places[number].label) for number, stream in streams.items()}
        self._selector = selectors.DefaultSelector()

    def close(self) -> None:
        """Ends the connections: others that still wait for this process hear of it."""
        for wire in self._wires.values():
            wire.stream.close()
        self._selector.close()

    def start(
        self, sync: Sync, receives: list[tuple[torch.Tensor, int]], sends: list[tuple[torch.Tensor, int]]
    ) -> Running:
        """Queues messages from and to processes, by number; their memory is in use until `finish` is done with them."""
        running: Running = []
        for number, wire in self._wires.items():
            for messages, way, phase in (
                ([memory for memory, source in receives if source == number], wire.coming, "receiving from"),
                ([memory for memory, peer in sends if peer == number], wire.going, "sending to"),
            ):
                if messages:
                    running.append((f"{phase} {wire.label}", way, way.add(messages)))
            self._watch(wire)
        return running

    def finish(self, sync: Sync, running: Running) -> None:
        """Waits for messages that were started; moves all others too that can be moved.

        Raises:
            WeightSyncError: names the processes that were waited for.
        """
        while late := [phase for phase, way, passed in running if way.moved < passed]:
            ready = self._selector.select(min(1.0, sync.deadline.left(", ".join(late))))
            for key, events in ready:
                try:
                    key.data.advance(events)
                except Lost as error:
                    raise sync.deadline.error(*error.args) from error
                self._watch(key.data)

    def _watch(self, wire: _Wire) -> None:
        wanted = wire.wanted
        if wanted == wire.events:
            return
        if not wanted:
            self._selector.unregister(wire.stream)
        elif not wire.events:
            self._selector.register(wire.stream, wanted, wire)
        else:
            self._selector.modify(wire.stream, wanted, wire)
        wire.events = wanted


def _store(link: Link) -> torch.distributed.Store:
    host, port = link.rendezvous
    return tcp_store(host, port, link.rank == 0, timedelta(seconds=link.settings.timeout_s), len(link.places))


def _meet(link: Link, store: torch.distributed.Store, peers: Sequence[int]) -> dict[int, socket.socket]:
    """A connection with each of `peers`: called on where its number is lower, else let in."""
    deadline, streams = Deadline(link.settings.timeout_s, -1, link.label), dict[int, socket.socket]()
    family, host = _own_address(link.rendezvous)
    with socket.create_server((host, 0), family=family, backlog=max(128, len(peers))) as door:
        store.set(_key(link.rank), f"{host} {door.getsockname()[1]}")
        for number in (peer for peer in peers if peer < link.rank):
            address, port = store.get(_key(number)).decode().split()
            phase = f"connecting with {link.places[number].label}"
            try:
                streams[number] = socket.create_connection((address, int(port)), deadline.left(phase))
                channel = _greet(link, streams[number], deadline.left(phase), is_server=False)
                channel.send(link.rank)
                channel.close()
            except (OSError, EOFError, AuthenticationError, ChannelLost) as error:
                raise deadline.error(phase, str(error)) from error
        while missing := [link.places[peer].label for peer in peers if peer not in streams]:
            door.settimeout(deadline.left(f"waiting for {', '.join(missing)} to connect"))
            try:
                stream, _ = door.accept()
            except TimeoutError:
                continue
            caller = _named(link, stream, deadline)
            if caller is None:
                stream.close()
            else:
                streams[caller] = stream
    return streams


def _named(link: Link, stream: socket.socket, deadline: Deadline) -> int | None:
    """Who has come in; None for somebody who does not belong here."""
    try:
        channel = _greet(link, stream, _GREETING_S, is_server=True)
        number: Any = channel.receive(deadline.left, "waiting for a process to say who it is")
        channel.close()
    except (OSError, EOFError, AuthenticationError, ChannelLost):
        return None
    return int(number)


def _greet(link: Link, stream: socket.socket, seconds: float, is_server: bool) -> Channel:
    """Checks that the other process belongs to this sync; returns a channel over the same connection."""
    # `greet` sets itself no limit, so the system does: a stranger may say nothing.
    stream.settimeout(None)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", math.ceil(seconds), 0))
    channel = Channel(stream.dup(), "a process")
    channel.greet(link, is_server)
    return channel


def _own_address(rendezvous: tuple[str, int]) -> tuple[socket.AddressFamily, str]:
    """This machine's address on the network where the rendezvous is."""
    family, kind, _, _, address = socket.getaddrinfo(*rendezvous, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return family, str(probe.getsockname()[0])


def _key(number: int) -> str:
    return f"weight sync {number}"
