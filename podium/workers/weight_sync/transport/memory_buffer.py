"""Colocated with a Megatron actor: the stages of a pipeline exchange their flat memory, then each rank copies its part.

verl's way, under its name: `podium.utils.memory_buffer.MegatronMemoryBufferForRollout`.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from podium.utils.device import device
from podium.utils.errors import UserError
from podium.utils.memory_buffer import FlatStage, MegatronMemoryBufferForRollout, WeightBuffers
from podium.utils.piece import Piece
from podium.workers.weight_sync.boxes import Box
from podium.workers.weight_sync.checksum import as_int64, combined, tensor_checksum
from podium.workers.weight_sync.transport.base import TRANSPORT_KEY, Place, Sync, Transport, WeightSyncError
from podium.workers.weight_sync.transport.exchange import Exchange, GroupCarrier
from podium.workers.weight_sync.transport.host import wait


class MemoryBufferTransport(Transport):
    """One asynchronous broadcast for each flat buffer of each stage, straight from the memory that is trained.

    Then every rank has its tensor-parallel slice of the whole model. What of it the rollout's engine wants is copied
    into the engine, what comes from other slices is exchanged as by `colocated`, and the other stages are freed.
    """

    name: ClassVar[str] = "memory_buffer"

    @classmethod
    def check(cls, places: Sequence[Place]) -> None:
        if not all(place.is_source and place.is_destination for place in places):
            raise UserError(f"{TRANSPORT_KEY}={cls.name}: the rollout has processes of its own; use ipc or broadcast")
        if not all(place.pipeline for place in places):
            raise UserError(f"{TRANSPORT_KEY}={cls.name}: only strategy=megatron keeps stages in memory; use colocated")

    @classmethod
    def held(cls, places: Sequence[Place], boxes: Sequence[Sequence[Box]]) -> list[Sequence[Box]]:
        return [list(dict.fromkeys(box for rank in place.pipeline for box in boxes[rank])) for place in places]

    def connect(self) -> None:
        link, timeout = self.link, timedelta(seconds=self.link.settings.timeout_s)
        pipelines = sorted({place.pipeline for place in link.places})
        # Groups of their own: after a sync that failed, nothing of it is left in the trainer's.
        self._group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in pipelines], timeout)
        self._metas: list[Any] = [None] * len(link.places[link.rank].pipeline)
        dist.all_gather_object(self._metas, self._stage().meta, group=self._group)
        self._memory = MegatronMemoryBufferForRollout(self._named)
        everyone = dist.new_group(timeout=timeout) if len(link.places) > 1 else None
        self.link = replace(link, source=lambda: list(self._pieces.values()))
        self._exchange = Exchange(self.link, GroupCarrier(self.link, everyone))

    def _stage(self) -> FlatStage:
        assert self.link.stage is not None
        stage = self.link.stage()
        assert stage is not None, "checked by `check`"
        return stage

    def _named(self, weights: WeightBuffers) -> dict[str, torch.Tensor]:
        """A name for each box, as a tensor may lie in several."""
        self._pieces: dict[str, Piece] = {f"{p.name}{list(p.starts)}": p for p in self._stage().transform(weights)}
        return {name: piece.tensor for name, piece in self._pieces.items()}

    def transfer(self, sync: Sync) -> None:
        stage = self._stage()
        self._memory.initialize_weight_buffer(self._metas, stage.ranks.index(self.link.rank), stage.buffers)
        try:
            self._memory.build_memory_reference()
            self._gather(sync)
            self._exchange(sync)
        finally:
            self._pieces = {}
            self._memory.release()

    def _gather(self, sync: Sync) -> None:
        """Brings the other stages here, and compares them with what their ranks have.

        Raises:
            WeightSyncError: one did not come, or is another.
        """
        labels = [self.link.places[rank].label for rank in self.link.places[self.link.rank].pipeline]
        own = labels.index(self.link.label)
        sent = torch.tensor([sync.version, self._checksum(sync, own)], device=device())
        facts = [torch.empty_like(sent) for _ in labels]
        phase = f"meeting {', '.join(labels)}"
        try:
            wait(sync, phase, dist.all_gather(facts, sent, group=self._group, async_op=True))
            versions, checksums = zip(*(each.tolist() for each in facts), strict=True)
            for label, version in zip(labels, versions, strict=True):
                if version != sync.version:
                    raise sync.deadline.error(phase, f"{label} sends version {version}")
            works = self._memory.allgather_params(self._group)
        except WeightSyncError:
            raise
        except RuntimeError as error:
            raise sync.deadline.error(phase, str(error).splitlines()[0]) from error
        sync.report.bytes_sent += sum(flat.nbytes for flat in self._memory.flat(own)) * (len(labels) - 1)
        for stage, work in works:
            wait(sync, f"the stage of {labels[stage]}", work)
        for stage, checksum in enumerate(checksums):
            if stage != own and self._checksum(sync, stage) != checksum:
                raise sync.deadline.error("verification", f"the stage of {labels[stage]} did not arrive as it was sent")

    def _checksum(self, sync: Sync, stage: int) -> int:
        """Of a stage's memory, signed; 0 where it is not verified at this version."""
        if not sync.is_verified(stage, len(self._metas)):
            return 0
        with sync.verifying():
            return as_int64(combined(tensor_checksum(flat) for flat in self._memory.flat(stage)))

    def close(self) -> None:
        self._exchange.close()
        dist.destroy_process_group(self._group)
