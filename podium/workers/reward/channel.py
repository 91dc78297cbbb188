"""What the driver and a scoring process send each other: length-prefixed pickles, and a page of shared memory.

The page says which item the process is at and since when, so that a driver need not be told of every start, and knows
whom to blame for a process that has died.
"""

import mmap
import os
import pickle
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<Q")

_ITEM, _SINCE = 0, 1
"""Places of eight bytes in the page."""
NOTHING = -1
"""Item of a process that is at none."""


def pack(message: Any) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Messages from a stream of bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


class Progress:
    """The shared page. The process writes, the driver reads."""

    def __init__(self, fd: int | None = None):
        self.fd = os.memfd_create("podium_reward") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        # Each is written in one piece: struct would write zeros first, and a reader in between would take a process
        # for late since the machine was started.
        self._items, self._times = memoryview(self._page).cast("q"), memoryview(self._page).cast("d")
        if fd is None:
            self.set(NOTHING)

    def set(self, item: int) -> None:
        """Now at `item`."""
        # In this order: a reader in between sees the last item with a later time, never an item with an earlier one.
        self._times[_SINCE] = time.monotonic()
        self._items[_ITEM] = item

    def get(self) -> tuple[int, float]:
        """The item, and when it began, in seconds of `time.monotonic` (one clock for all processes)."""
        item = self._items[_ITEM]
        return item, self._times[_SINCE]

    def close(self) -> None:
        """Lets go of the page."""
        self._items.release()
        self._times.release()
        self._page.close()
        os.close(self.fd)
