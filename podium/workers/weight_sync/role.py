"""What the actor and the rollout have in common: an end of the weight sync."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from podium.protocol import Dispatch, Worker, register
from podium.utils.memory_buffer import FlatStage
from podium.utils.piece import Piece
from podium.workers.rollout.base import RolloutEngine
from podium.workers.weight_sync.connection import Endpoint, connect, describe
from podium.workers.weight_sync.transport.base import SyncReport, SyncSettings, Transport

Source = Callable[[], list[Piece]]


class SyncRole(Worker):
    """A role that sends weights, receives them, or does both in one process.

    Calls do not block: ends in different processes wait for each other.
    """

    _connection: Transport | None = None

    @abstractmethod
    def _sync_ends(self) -> tuple[str, Source | None, RolloutEngine | None]:
        """What this process is called in messages, its trainer's weights, and its rollout engine."""

    def _flat_stage(self) -> FlatStage | None:
        """Its trainer's weights as they lie in flat memory, where they do."""
        return None

    def _weights_at_hand(self) -> AbstractContextManager[None]:
        """Open while the trainer's weights are read."""
        return nullcontext()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sync_endpoint(self) -> Endpoint:
        """Says what this process holds, and where."""
        label, source, engine = self._sync_ends()
        return describe(f"{label} rank {self.rank}", source, engine, self._flat_stage)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def connect_sync(self, transport: str, endpoints: Sequence[Endpoint], first: int, settings: SyncSettings) -> None:
        """Connects this process with all `endpoints`.

        Args:
            first: number of this group's rank 0 among them.
        """
        self.disconnect_sync()
        _, source, engine = self._sync_ends()
        self._connection = connect(transport, endpoints, first + self.rank, settings, source, engine, self._flat_stage)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sync_weights(self, version: int) -> SyncReport:
        """Sends the weights as `version`, or takes them, or both."""
        assert self._connection is not None, "connect_sync comes first"
        try:
            with self._weights_at_hand():
                return self._connection.sync(version)
        except BaseException:
            self.disconnect_sync()  # the others hear of it, instead of waiting for this process
            raise

    def disconnect_sync(self) -> None:
        """Frees what the connection holds."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
