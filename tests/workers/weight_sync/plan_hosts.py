"""A worker that makes a model's parameters under one engine after another, and tells what boxes it holds."""

from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from podium.models.megatron import parallel
from podium.models.megatron.parallel import MegatronLayout
from podium.protocol import Dispatch, Worker, register
from podium.workers.weight_sync.boxes import Box


class LayoutHost(Worker):
    """Nothing is loaded: only where parameters lie matters."""

    @register(Dispatch.ONE_TO_ALL)
    def megatron(self, path: str, layout: MegatronLayout) -> list[Box]:
        from podium.models.megatron.model import build_chunks
        from podium.models.megatron.name_map import pieces

        if parallel._current not in (None, layout):
            parallel.destroy()
        return [Box.of(piece) for piece in pieces(build_chunks(AutoConfig.from_pretrained(path), layout))]

    @register(Dispatch.ONE_TO_ALL)
    def fsdp(self, path: str) -> list[Box]:
        from podium.workers.engine.fsdp import FSDPEngine

        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        config = SimpleNamespace(dtype="float32", reshard_after_forward=True)
        return [Box.of(piece) for piece in FSDPEngine(module, lambda *_: {}, config).pieces()]

    @register(Dispatch.ONE_TO_ALL)
    def vllm(self, path: str, tp: int) -> list[Box]:
        from vllm.distributed.parallel_state import destroy_model_parallel

        from podium.utils.device import init_distributed
        from podium.workers.rollout.vllm import VLLMRollout

        init_distributed()
        engine = VLLMRollout(path, dtype="float32", max_model_len=64, max_num_seqs=2, tensor_parallel_size=tp)
        try:
            return [Box.of(piece) for piece in engine.pieces()]
        finally:
            engine.shutdown()
            destroy_model_parallel()  # the next engine's groups are of another size
