"""Messages between two processes of one machine, each wait with a deadline."""

import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from podium.workers.weight_sync.transport.base import Link

Left = Callable[[str], float]
"""Seconds left for a phase, which it names in the error that it raises when there are none."""


class ChannelLost(RuntimeError):
    """The other process is gone."""


class Channel:
    """One end of a connection. Objects are pickled, so both ends prove that they know the link's secret first."""

    def __init__(self, stream: socket.socket, label: str):
        stream.settimeout(None)
        self._connection = Connection(stream.detach())
        self.label = label
        """Of the other process."""

    def send(self, message: Any) -> None:
        """Raises:
        ChannelLost: nobody is there to read it.
        """
        try:
            self._connection.send(message)
        except OSError as error:
            raise ChannelLost(f"{self.label} is gone") from error

    def receive(self, left: Left, phase: str) -> Any:
        """The next message; waits at most for what is left.

        Raises:
            ChannelLost: it will not come.
        """
        try:
            while not self._connection.poll(min(1.0, left(phase))):
                pass
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise ChannelLost(f"{self.label} is gone") from error

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`."""
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def greet(self, link: Link, is_server: bool) -> None:
        """Checks that the other process belongs to this sync."""
        if is_server:
            deliver_challenge(self._connection, link.secret)
            answer_challenge(self._connection, link.secret)
        else:
            answer_challenge(self._connection, link.secret)
            deliver_challenge(self._connection, link.secret)


class Door:
    """Where a process lets the others in."""

    def __init__(self, link: Link):
        self._link = link
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(_address(link, link.rank))
        self._socket.listen()

    def let_in(self, left: Left) -> tuple[Any, Channel]:
        """The next that comes, and what it says."""
        phase = "waiting for rollout ranks to connect"
        self._socket.settimeout(left(phase))
        try:
            stream, _ = self._socket.accept()
        except TimeoutError:
            left(phase)
            raise
        channel = Channel(stream, "a process")
        channel.greet(self._link, is_server=True)
        number, hello = channel.receive(left, phase)
        channel.label = self._link.places[number].label
        return hello, channel

    def close(self) -> None:
        self._socket.close()


def call_on(link: Link, number: int, hello: Any, left: Left) -> Channel:
    """Connects with process `number`, which may not have opened its door yet."""
    label = link.places[number].label
    while True:
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(left(f"connecting with {label}"))
        try:
            stream.connect(_address(link, number))
            break
        except ConnectionRefusedError:
            stream.close()
            time.sleep(0.01)
    channel = Channel(stream, label)
    channel.greet(link, is_server=False)
    channel.send((link.rank, hello))
    return channel


def _address(link: Link, number: int) -> str:
    """In Linux's abstract namespace: nothing to clean up. The port is this connection's alone."""
    return f"\0podium-weight-sync-{link.rendezvous[1]}-{number}"
