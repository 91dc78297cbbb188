"""A training engine and a rollout engine in each process of a group, ends of a weight sync."""

from typing import Any

import torch

from podium.protocol import Dispatch, register
from podium.workers.rollout.base import Request, RolloutEngine, SamplingParams
from podium.workers.weight_sync.role import Source, SyncRole
from tests.workers.engine.hosts import EngineHost


class SyncHost(EngineHost, SyncRole):
    """Trains, syncs and generates as it is told."""

    rollout: RolloutEngine

    def _sync_ends(self) -> tuple[str, Source | None, RolloutEngine | None]:
        return "rank", self.engine.pieces, self.rollout

    @register(Dispatch.ONE_TO_ALL)
    def build_rollout(self, name: str, path: str, dtype: str) -> None:
        if name == "vllm":
            from podium.workers.rollout.vllm import VLLMRollout

            self.rollout = VLLMRollout(path, dtype=dtype, max_model_len=64, max_num_seqs=4)
        else:
            from podium.workers.rollout.hf import HFRollout

            self.rollout = HFRollout(path, dtype=dtype, max_num_seqs=4)

    @register(Dispatch.ONE_TO_ALL)
    def unequal(self, dtype: str) -> list[str]:
        """Tensors of which the rollout's bits are not those of the trainer's export."""
        held = {piece.name: piece.tensor for piece in self.rollout.pieces()}
        sent = dict(self.engine.export(getattr(torch, dtype)))
        return sorted(held.keys() ^ sent.keys()) + [n for n in held if not torch.equal(held[n], sent[n])]

    @register(Dispatch.ONE_TO_ALL)
    def greedy(self, prompt: tuple[int, ...], tokens: int) -> Any:
        """Greedy tokens of the rollout, and the trainer's weights, to generate with elsewhere."""
        request = Request("a", prompt, SamplingParams(max_tokens=tokens, temperature=0.0))
        return self.rollout.generate([request], 0)["a"].token_ids

    @register(Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> None:
        self.rollout.shutdown()
