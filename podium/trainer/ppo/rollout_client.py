"""The driver's side of the rollout: one that dies is started anew, and the step goes on."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from podium.protocol import DataProto, WorkerDied, WorkerError, WorkerGroup, WorkerTimeout
from podium.trainer.blame import blame

_ANSWER_S = 10.0

T = TypeVar("T")


class RolloutClient:
    """Calls to the rollout that outlive its processes.

    Where it runs in processes of its own and they die or do not answer in time, all of them are started anew, take the
    actor's weights under a new version, and the call is made again; a response depends on weights, prompt and seed
    only, so it is the one that was lost.

    Args:
        group: the rollout's.
        most: restarts in the whole run; 0 where it shares the actor's processes, which die with it.
        run_dir: where the report on ranks that do not answer goes.
    """

    def __init__(self, group: WorkerGroup, most: int, run_dir: Path):
        self._group, self._most, self._run_dir = group, most, run_dir
        self.refeed: Callable[[], None]
        """Syncs the weights with a rollout that has none; whoever owns the actor sets it."""
        self.restarts = 0

    def generate_sequences(self, request: DataProto) -> DataProto:
        """As `RolloutWorker.generate_sequences`."""
        return self._again(lambda: self._group.generate_sequences(request))

    def begin_sequences(self, request: DataProto) -> None:
        """As `RolloutWorker.begin_sequences`."""
        self._again(lambda: self._group.begin_sequences(request))

    def finished_sequences(self, steps: int) -> list[tuple[DataProto | None, int]]:
        """As `RolloutWorker.finished_sequences`, of each copy; nothing is left in one that has been started anew."""
        return self._again(lambda: self._group.finished_sequences(steps))

    def sleep(self, keep_weights: bool) -> list[int]:
        """As `RolloutWorker.sleep`."""
        return self._again(lambda: self._group.sleep(keep_weights))

    def memory_used(self) -> list[dict[str, float]]:
        """As `RolloutWorker.memory_used`."""
        return self._again(self._group.memory_used)

    def syncing(self, sync: Callable[[], T]) -> T:
        """What `sync`, which moves weights to the rollout, returns.

        Raises:
            WorkerError: it failed, and not because the rollout is gone; or it is gone once too often.
        """
        return self._again(sync, is_sync=True)

    def _again(self, call: Callable[[], Any], is_sync: bool = False) -> Any:
        while True:
            try:
                return call()
            except WorkerError as error:
                if self.restarts >= self._most or not self._is_gone(error):
                    raise
                self._restart(error)
            if not is_sync:
                self.refeed()

    def _is_gone(self, error: WorkerError) -> bool:
        """Whether the rollout is why: an actor that loses it in a sync fails, too."""
        if isinstance(error, WorkerDied | WorkerTimeout) and error.role != self._group.role:
            return False
        return not self._group.answers(_ANSWER_S)

    def _restart(self, error: WorkerError) -> None:
        self.restarts += 1
        report = f"\nwhat each rank is doing: {blame(self._run_dir, error)}" if isinstance(error, WorkerTimeout) else ""
        print(
            f"{error}{report}\nrollout: started anew ({self.restarts} of at most {self._most} times)",
            file=sys.stderr,
            flush=True,
        )
        self._group.restart()
        self._group.init_model()
