"""What the trained roles (actor, critic) and the reference share: their tensors, their engine, their update loop."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podium.protocol import (
    DISPATCH_VALID,
    DataProto,
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_dispatch_fn,
    register,
)
from podium.utils.checkpoint import Files, seal, write_synced
from podium.utils.device import memory_used
from podium.utils.memory_ledger import LEDGER
from podium.utils.random_state import random_state, set_random_state
from podium.workers.engine.base import EmptyBatchError, LossFn, NonFiniteError, Tensors
from podium.workers.engine.build import build_engine
from podium.workers.engine.spec import ModelSpec, Training
from podium.workers.saving import Saving

ENGINE_MESH = "engine"
"""The mesh of a role's data-parallel shards, as its engine laid them out."""

ENGINE_COMPUTE_PROTO = make_nd_compute_dataproto_dispatch_fn(ENGINE_MESH)
"""A batch is sharded over the engine's data-parallel ranks; their answers are concatenated."""
ENGINE_COMPUTE_METRIC = make_nd_compute_dispatch_fn(ENGINE_MESH)
"""The same; the answers are a list, one for each shard."""


def tensors_of(data: DataProto) -> Tensors:
    """The batch's tensors; rows that a dispatcher added to fill a shard lose their response mask."""
    assert data.batch is not None
    tensors = dict(data.batch.items())
    valid = tensors.pop(DISPATCH_VALID, None)
    if valid is not None:
        tensors["response_mask"] = tensors["response_mask"].bool() & valid[:, None]
    return tensors


class EngineRole(Worker):
    """A role that computes with a training engine, whichever it is."""

    def _start(self, strategy: str, config: Any, model: ModelSpec, training: Training | None = None) -> None:
        """Builds the engine and takes its place among the data-parallel shards."""
        self._engine = build_engine(strategy, config, model, training)
        placement = self._engine.placement
        self.register_mesh(ENGINE_MESH, placement.dp_rank, placement.answers)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_used(self) -> dict[str, float]:
        """Of this process (`podium.utils.device.memory_used`), and the peaks of each method since the last time."""
        return memory_used() | LEDGER.pop(self.role)


class TrainedRole(EngineRole):
    """A role with a model that it trains: the actor and the critic, up to what they compute.

    Args:
        config: has ``strategy``, the section of that engine, ``optim``, ``grad_clip``.
        objective: the loss to minimise; the algorithm's, so that the role knows none.
        mini_batch_rows: sequences of one data-parallel shard in one optimizer step.
        micro_batch_rows: sequences in one forward and backward.
        epochs: passes over each batch.
        total_steps: optimizer steps of the run.
    """

    def __init__(
        self,
        config: Any,
        objective: LossFn,
        *,
        mini_batch_rows: int,
        micro_batch_rows: int,
        epochs: int = 1,
        total_steps: int,
    ):
        super().__init__()
        self._config, self._objective = config, objective
        self._mini_batch_rows, self._micro_batch_rows = mini_batch_rows, micro_batch_rows
        self._epochs, self._total_steps = epochs, total_steps
        self._saving: Saving | None = None

    def _start_training(self, model: ModelSpec) -> None:
        """Lays the model out over the ranks, with an optimizer."""
        config = self._config
        self._start(config.strategy, config, model, Training(config.optim, self._total_steps, config.grad_clip))

    def _update(self, data: DataProto) -> list[dict[str, float]]:
        """One optimizer step for each mini-batch of each epoch, in the batch's order; the metrics of each step.

        Of one that was not made: ``skipped`` (loss or gradient not finite) or ``empty`` (no valid token).
        """
        batch, rows = tensors_of(data), self._mini_batch_rows
        return [
            self._step({name: tensor[start : start + rows] for name, tensor in batch.items()})
            for _ in range(self._epochs)
            for start in range(0, len(data), rows)
        ]

    def _step(self, mini_batch: Tensors) -> dict[str, float]:
        try:
            return self._engine.train(mini_batch, self._objective, self._micro_batch_rows)
        except NonFiniteError:
            return {"skipped": 1.0}
        except EmptyBatchError:
            return {"empty": 1.0}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self) -> int:
        """What a checkpoint takes on the disk from this rank."""
        return self._engine.state_bytes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False) -> None:
        """Writes weights, optimizer, schedule and random states under the directory `path`.

        With `background`, returns once they are copied; `saved_files` says when they are written.
        """
        write = self._engine.snapshot() if background else self._engine.save
        random = {**random_state(), "engine": self._engine.random_state()}
        self._saving = Saving(lambda: self._save(path, write, random), background)

    def _save(self, path: str, write: Callable[[str], None], random: dict[str, Any]) -> Files:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        write(path)
        states = folder / f"random_{self.rank}.json"
        write_synced(states, json.dumps(random) + "\n")
        # Ranks that end their writing together seal what they wrote together; each its own random states.
        shared = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("random_")]
        mine = [*sorted(shared)[self.rank :: self.world_size], states]
        return seal(mine, folder.parent)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def saved_files(self, wait: bool = True) -> Files | None:
        """Digests of the files that this rank answers for; None if they are still being written and not waited for.

        Raises:
            OSError: they could not be written.
        """
        assert self._saving is not None, "no save has begun"
        return self._saving.result(wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_saving(self) -> None:
        """Waits until this rank writes nothing any more, whatever came of it."""
        if self._saving is not None:
            self._saving.end()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Reads what `save_checkpoint` wrote, also from another number of ranks."""
        self._engine.load(path)
        states = Path(path) / f"random_{self.rank}.json"
        if states.exists():  # not there for ranks beyond those that saved
            random = json.loads(states.read_text(encoding="utf-8"))
            set_random_state(random)
            self._engine.set_random_state(random["engine"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        """Writes the model as an ordinary Hugging Face directory."""
        self._engine.save_hf(path)
