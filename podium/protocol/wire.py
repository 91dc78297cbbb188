"""Messages over a socket: pickle protocol 5, large buffers beside the pickle and not inside it."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

try:
    import cloudpickle
except ImportError:  # only code that other processes cannot import (a script's own classes, lambdas) needs it
    cloudpickle = None

_HEADER = struct.Struct("<QBI")  # number, kind, frames
_IN_BAND = 16384  # bytes; below this a buffer of its own costs more than the copy


@dataclass
class Message:
    """A numbered message whose content is still encoded, so that it can be passed on without being read."""

    number: int
    kind: int
    frames: list[Any]

    def content(self) -> Any:
        """Decode. Arrays lie in the frames' memory."""
        return pickle.loads(self.frames[0], buffers=self.frames[1:])


def encode(value: Any) -> list[Any]:
    """The pickle, then its out-of-band buffers."""
    buffers: list[Any] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND:
            return True
        buffers.append(raw)
        return False

    dumps = pickle.dumps if cloudpickle is None else cloudpickle.dumps
    return [dumps(value, protocol=5, buffer_callback=beside), *buffers]


def send(sock: socket.socket, message: Message) -> None:
    """Write a message. OSError if the other side is gone."""
    lengths = [memoryview(f).nbytes for f in message.frames]
    head = _HEADER.pack(message.number, message.kind, len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    sock.sendall(head + bytes(message.frames[0]) if lengths[0] < 1 << 20 else head)
    for frame in message.frames[0 if lengths[0] >= 1 << 20 else 1 :]:
        sock.sendall(frame)


def receive(sock: socket.socket) -> Message:
    """Read a message. EOFError or OSError if the other side is gone."""
    number, kind, count = _HEADER.unpack(_exactly(sock, _HEADER.size))
    lengths = struct.unpack(f"<{count}Q", _exactly(sock, 8 * count))
    return Message(number, kind, [_exactly(sock, n) for n in lengths])


def _exactly(sock: socket.socket, size: int) -> bytearray:
    out = bytearray(size)
    view, got = memoryview(out), 0
    while got < size:
        n = sock.recv_into(view[got:])
        if n == 0:
            raise EOFError
        got += n
    return out
