"""Workers that hold the two ends of a sync. A module of its own, because processes import it."""

import dataclasses

import torch

from podium.protocol import Dispatch, register
from podium.utils.device import init_distributed
from podium.utils.memory_buffer import FlatStage
from podium.workers.rollout.base import Request, RolloutEngine, SamplingParams
from podium.workers.weight_sync.connection import Endpoint
from podium.workers.weight_sync.role import Source, SyncRole
from tests.workers.engine.hosts import EngineHost
from tests.workers.engine.megatron_hosts import MegatronHost


def build_rollout(kind: str, path: str, dtype: str, tp: int = 1) -> RolloutEngine:
    """A small engine."""
    if kind == "hf":
        from podium.workers.rollout.hf import HFRollout

        return HFRollout(path, dtype=dtype, max_num_seqs=8)
    from podium.workers.rollout.vllm import VLLMRollout

    return VLLMRollout(path, dtype=dtype, max_model_len=64, max_num_seqs=8, tensor_parallel_size=tp)


class Holder(SyncRole):
    """Has a rollout engine, or gets one."""

    rollout: RolloutEngine | None = None

    @register(Dispatch.ONE_TO_ALL)
    def build_rollout(self, kind: str, path: str, dtype: str, tp: int = 1) -> None:
        init_distributed()
        self.drop_rollout()
        self.rollout = build_rollout(kind, path, dtype, tp)
        self._is_vllm = kind == "vllm"

    @register(Dispatch.ONE_TO_ALL)
    def drop_rollout(self) -> None:
        """Ends the engine, and the groups of its ranks: the next may be of another size."""
        self.disconnect_sync()
        if self.rollout is None:
            return
        self.rollout.shutdown()
        self.rollout = None
        if self._is_vllm:
            from vllm.distributed.parallel_state import destroy_model_parallel

            destroy_model_parallel()

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> int:
        """Gives the engine's weights and cache back."""
        assert self.rollout is not None
        return self.rollout.sleep(keep_weights=False)

    @register(Dispatch.ONE_TO_ALL)
    def held(self) -> tuple[int, list[tuple[str, tuple[int, ...], torch.Tensor]]]:
        """The engine's version, and each of its pieces: name, where it starts, a copy."""
        assert self.rollout is not None
        pieces = [(piece.name, piece.starts, piece.tensor.clone()) for piece in self.rollout.pieces()]
        return self.rollout.weight_version, pieces

    @register(Dispatch.ONE_TO_ALL)
    def greedy(self, prompts: list[tuple[int, ...]], tokens: int, version: int) -> list[list[int]]:
        assert self.rollout is not None
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        requests = [Request(f"{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        outputs = self.rollout.generate(requests, version)
        return [outputs[request.request_id].token_ids for request in requests]


class ActorEnd(EngineHost, Holder):
    """A trainer, with the rollout in its process or without."""

    def _sync_ends(self) -> tuple[str, Source | None, RolloutEngine | None]:
        return "actor", self.engine.pieces, self.rollout


class MegatronEnd(MegatronHost, Holder):
    """As `ActorEnd`, on Megatron."""

    def _sync_ends(self) -> tuple[str, Source | None, RolloutEngine | None]:
        return "actor", self.engine.pieces, self.rollout

    def _flat_stage(self) -> FlatStage | None:
        return self.engine.flat_stage()


class RolloutEnd(Holder):
    """A rollout in a process of its own."""

    def _sync_ends(self) -> tuple[str, Source | None, RolloutEngine | None]:
        return "rollout", None, self.rollout


class ActorOnDevice(ActorEnd):
    """Says that each rank has a device to itself."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sync_endpoint(self) -> Endpoint:
        return on_device(super().sync_endpoint(), self.rank)


class RolloutOnDevice(RolloutEnd):
    """Likewise: rollout rank i is on the device of actor rank i."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sync_endpoint(self) -> Endpoint:
        return on_device(super().sync_endpoint(), self.rank)


def on_device(end: Endpoint, number: int) -> Endpoint:
    return dataclasses.replace(end, place=dataclasses.replace(end.place, device=f"device {number}"))
