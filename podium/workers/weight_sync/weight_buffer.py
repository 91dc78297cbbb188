"""Where versions of weights lie between the process that writes them and those that take them, by name."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from podium.utils.errors import UserError
from podium.workers.weight_sync.snapshot import Snapshot, SnapshotReader, SnapshotWriter
from podium.workers.weight_sync.transport.base import TRANSPORT_KEY, Place


class WeightBuffer(ABC):
    """Versions of one process's packed weights: an object in the process that writes them, and one in each reader.

    A subclass under `register_weight_buffer` is a transport of that name: it decides where the bytes lie, everything
    else (what is packed, checksums, deadlines, the ledger) is the transport's.

    Args:
        name: alike for the writer and its readers, and theirs alone.
        nbytes: of a version.
        is_writer: whether this process writes.
    """

    def __init__(self, name: str, nbytes: int, is_writer: bool):
        self.name, self.nbytes, self.is_writer = name, nbytes, is_writer

    @classmethod  # noqa: B027 (most buffers have nothing to check)
    def check(cls, places: Sequence[Place]) -> None:
        """Refuses processes that cannot share a buffer.

        Raises:
            UserError: says why.
        """

    @abstractmethod
    def writing(self, version: int, timeout_s: float) -> contextlib.AbstractContextManager[Snapshot]:
        """Memory of `nbytes` and notes to fill; leaving without an exception publishes them, all at once.

        Raises:
            SnapshotError: it cannot be written within `timeout_s`; the version before is whole.
        """

    @abstractmethod
    def acquire(self, version: int, timeout_s: float) -> contextlib.AbstractContextManager[Snapshot]:
        """Holds `version`, or a later one, as it was published, until the context is left.

        Raises:
            SnapshotError: it does not come within `timeout_s`.
        """

    def close(self) -> None:  # noqa: B027 (nothing to free)
        """Frees what the object holds."""


WEIGHT_BUFFERS: dict[str, type[WeightBuffer]] = {}
_B = TypeVar("_B", bound=type[WeightBuffer])


def register_weight_buffer(name: str) -> Callable[[_B], _B]:
    """Decorator that makes a buffer available as ``weight_sync.transport=name``.

    Raises:
        UserError: the name is taken.
    """

    def decorate(buffer: _B) -> _B:
        taken = WEIGHT_BUFFERS.get(name)
        # A module that is reloaded registers the same class again.
        if taken is not None and taken.__qualname__ != buffer.__qualname__:
            raise UserError(f"{TRANSPORT_KEY} {name!r} is already registered by {taken.__module__}.{taken.__name__}")
        WEIGHT_BUFFERS[name] = buffer
        return buffer

    return decorate


@register_weight_buffer("cpu")
class HostBuffer(WeightBuffer):
    """POSIX shared memory of one machine (see `podium.workers.weight_sync.snapshot`)."""

    def __init__(self, name: str, nbytes: int, is_writer: bool):
        super().__init__(name, nbytes, is_writer)
        self._writer = SnapshotWriter(name, nbytes) if is_writer else None
        self._reader = SnapshotReader(name)

    @classmethod
    def check(cls, places: Sequence[Place]) -> None:
        hosts = {place.host: place.label for place in places}
        if len(hosts) > 1:
            raise UserError(
                f"{TRANSPORT_KEY}=cpu: {' and '.join(list(hosts.values())[:2])} do not share memory; use broadcast or "
                "sharded"
            )

    def writing(self, version: int, timeout_s: float) -> contextlib.AbstractContextManager[Snapshot]:
        assert self._writer is not None
        return self._writer.writing(version, timeout_s)

    def acquire(self, version: int, timeout_s: float) -> contextlib.AbstractContextManager[Snapshot]:
        return self._reader.acquire(version, timeout_s)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
