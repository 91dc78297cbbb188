"""Answers that have not arrived yet."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from podium.protocol.data import DataProto
from podium.protocol.deadline import NO_DEADLINE, Deadline
from podium.protocol.errors import WorkerTimeout
from podium.protocol.sharding import real_rows, shard


class Handle(ABC):
    """One rank's answer to one call. Each backend has its own kind."""

    role: str
    rank: int
    method: str

    @classmethod
    @abstractmethod
    def gather(cls, handles: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Every answer, in order; raises the first failure *in time* without waiting for the others.

        Raises:
            WorkerError, WorkerDied, WorkerTimeout, UserError.
        """

    @classmethod
    @abstractmethod
    def ready(cls, handles: Sequence[Any]) -> bool:
        """Whether every answer has arrived."""


def gather(handles: Sequence[Handle], deadline: Deadline) -> list[Any]:
    """Answers of handles of one or several kinds, in order.

    Raises:
        WorkerError, WorkerDied, WorkerTimeout, UserError.
    """
    try:
        return _gather(handles, deadline.seconds)
    except WorkerTimeout as error:
        raise deadline.explain(error) from None


def _gather(handles: Sequence[Handle], timeout_s: float | None) -> list[Any]:
    kinds = {type(h) for h in handles}
    if len(kinds) == 1:
        return kinds.pop().gather(handles, timeout_s)
    until = None if timeout_s is None else time.monotonic() + timeout_s
    return [type(h).gather([h], None if until is None else max(0.0, until - time.monotonic()))[0] for h in handles]


class Future:
    """The result of a ``blocking=False`` call."""

    def __init__(self, handles: Sequence[Handle], finish: Callable[[list[Any]], Any], deadline: Deadline) -> None:
        self._handles, self._finish, self._deadline = list(handles), finish, deadline

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait (at most ``timeout_s``, by default the group's) and return what the blocking call would have."""
        return self._finish(gather(self._handles, self._deadline if timeout_s is None else Deadline(timeout_s)))

    def done(self) -> bool:
        """Whether every rank has answered."""
        return all(type(h).ready([h]) for h in self._handles)


def get_all(futures: Sequence[Future]) -> list[Any]:
    """Results of calls, of the same backend, that wait for each other: raises the first failure of any of them."""
    handles = [handle for future in futures for handle in future._handles]
    limits = [future._deadline for future in futures if future._deadline.seconds is not None]
    answers = iter(gather(handles, min(limits, key=lambda limit: limit.seconds or 0.0, default=NO_DEADLINE)))
    return [future._finish([next(answers) for _ in future._handles]) for future in futures]


class DataProtoFuture:
    """A DataProto that workers are still making.

    May be passed to another group's method in place of a DataProto: on Ray the data then goes from worker to worker and
    never through the driver. ``chunk`` cuts it before it exists.
    """

    def __init__(
        self, handles: Sequence[Handle], deadline: Deadline = NO_DEADLINE, part: tuple[int, int] | None = None
    ) -> None:
        self._handles, self._deadline, self._part = list(handles), deadline, part
        self.padding: tuple[int, int] | None = None
        """(real rows, all rows) of what ``get`` gave, where that is a padded shard."""

    @staticmethod
    def concat(data: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """The rows of every future, one after the other.

        Raises:
            ValueError: nothing to concatenate, or a chunk of a future (get it first).
        """
        if not data or any(f._part is not None for f in data):
            raise ValueError("DataProtoFuture.concat needs at least one future, and none that is a chunk")
        return DataProtoFuture([h for f in data for h in f._handles], data[0]._deadline)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """``chunks`` futures of equal length; a length that ``chunks`` does not divide is padded as in dispatch.

        Raises:
            ValueError: this is a chunk already.
        """
        if self._part is not None:
            raise ValueError("a chunk of a DataProtoFuture cannot be chunked again; get it first")
        return [DataProtoFuture(self._handles, self._deadline, (i, chunks)) for i in range(chunks)]

    def get(self, timeout_s: float | None = None) -> DataProto:
        """Wait (at most ``timeout_s``, by default the group's) and return the DataProto."""
        parts = gather(self._handles, self._deadline if timeout_s is None else Deadline(timeout_s))
        # A copy in every case: several readers may get the same memory, and each may write to what it got.
        whole = DataProto.concat(parts) if len(parts) > 1 else DataProto.concat([parts[0].select(deepcopy=True)])
        if self._part is None:
            return whole
        mine = shard(whole, self._part[1])[self._part[0]]
        self.padding = real_rows([mine])
        return mine

    def done(self) -> bool:
        """Whether every rank has answered."""
        return all(type(h).ready([h]) for h in self._handles)
