"""LoRA in vLLM: one adapter whose A and B are written in place, as boxes of whole matrices."""

from collections.abc import Iterator
from typing import Any

import torch

from podium.models.lora import LoRA
from podium.utils.piece import Piece
from podium.workers.rollout.vllm_layout import columns_piece, row_ranges, rows_piece, stacked_modules, stacked_names

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM keeps room
_SLOT = 0


def lora_options(lora: LoRA | None) -> dict[str, Any]:
    """Arguments of ``LLM`` for one adapter, or none."""
    if lora is None:
        return {}
    assert lora.targets is not None, "the layers by name: vLLM would make room on every one"
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= lora.rank),
        "lora_target_modules": sorted({name.rsplit(".", 1)[-1] for name in lora.targets}),
    }


def adapter_pieces(model: torch.nn.Module, lora: LoRA) -> list[Piece]:
    """What this tensor-parallel rank holds of ``LAYER.lora_A.weight`` (rank, in) and ``lora_B.weight`` (out, rank)."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    stacked = stacked_modules(model)
    found = [
        piece
        for prefix, module in model.named_modules()
        if isinstance(module, BaseLinearLayerWithLoRA)
        for piece in _pieces(prefix, module, stacked, lora.rank)
    ]
    adapted = set(lora.targets or ())
    return [piece for piece in found if piece.name.rsplit(".lora_", 1)[0] in adapted]


def _pieces(prefix: str, wrapper: Any, stacked: dict[str, list[str]], rank: int) -> Iterator[Piece]:
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = wrapper.base_layer
    if isinstance(layer, RowParallelLinear):
        a, b = wrapper.lora_a_stacked[0][_SLOT, 0], wrapper.lora_b_stacked[0][_SLOT, 0]
        yield columns_piece(f"{prefix}.lora_A.weight", a[:rank], layer.tp_rank)
        yield rows_piece(f"{prefix}.lora_B.weight", 0, b[:, :rank])
        return
    names = stacked_names(prefix, "lora_B.weight", stacked)
    stacks = zip(wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True)
    for (name, first, count), (a, b) in zip(row_ranges(layer, names, layer.weight), stacks, strict=True):
        yield rows_piece(name.replace(".lora_B.", ".lora_A."), 0, a[_SLOT, 0, :rank])
        yield rows_piece(name, first, b[_SLOT, 0, :count, :rank])
