"""vLLM's parameters as boxes of the Hugging Face tensors that they are fused and sharded from."""

from collections.abc import Iterator
from typing import Any

import torch

from podium.utils.errors import UserError
from podium.utils.piece import Piece
from podium.workers.rollout.vllm_cpu import natural_experts

# What the modules of these names stack along dim 0; a model's `packed_modules_mapping` may say otherwise.
_STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

# vLLM's kernels that read experts as they are loaded (the CPU build's: beside a repacked copy).
_NATURAL_EXPERTS = ("TRITON", "BATCHED_TRITON", "CPU")

_Rows = tuple[str, int, int]
"""Name of a whole tensor, the first of its rows that are here, and how many are."""


def stacked_modules(model: torch.nn.Module) -> dict[str, list[str]]:
    """What the modules of some names stack along dim 0: last names of modules of the checkpoint."""
    return {**_STACKED, **getattr(model, "packed_modules_mapping", {})}


def vllm_pieces(model: torch.nn.Module) -> list[Piece]:
    """What this tensor-parallel rank holds of each tensor of the checkpoint, as views of its parameters.

    Padding (of the vocabulary, of an expert's width) belongs to no piece. A head tied to the embedding shares its
    parameter and appears once, under the embedding's name.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    stacked = stacked_modules(model)
    pieces: list[Piece] = []
    seen: set[tuple[int, int]] = set()
    for wrapped, module in model.named_modules():
        prefix = wrapped.removesuffix(".base_layer")  # of a layer that takes adapters
        if isinstance(module, RoutedExperts):
            pieces += _experts(prefix, module)
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            place = parameter.untyped_storage()._cdata, parameter.storage_offset()
            if place in seen:
                continue
            seen.add(place)
            pieces += _pieces(prefix, module, leaf, parameter.data, stacked)
    return pieces


def _pieces(prefix: str, module: Any, leaf: str, data: torch.Tensor, stacked: dict[str, list[str]]) -> Iterator[Piece]:
    from vllm.model_executor.layers.linear import RowParallelLinear

    if isinstance(module, RowParallelLinear) and data.dim() == 2:
        yield columns_piece(f"{prefix}.{leaf}", data, module.tp_rank)
        return
    start = 0
    for whole, first, count in row_ranges(module, stacked_names(prefix, leaf, stacked), data):
        yield rows_piece(whole, first, data[start : start + count])
        start += count


def stacked_names(prefix: str, leaf: str, stacked: dict[str, list[str]]) -> list[str]:
    """The checkpoint's tensors that the parameter `leaf` of the module at `prefix` is made of, in their order."""
    parent, _, own = prefix.rpartition(".")
    return [f"{parent}.{part}.{leaf}" for part in stacked[own]] if own in stacked else [f"{prefix}.{leaf}"]


def row_ranges(module: Any, parts: list[str], data: torch.Tensor) -> Iterator[_Rows]:
    """The runs of rows in a parameter of `module`, in order, when it stacks the tensors `parts`."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, QKVParallelLinear):
        q, k, v = parts
        key_rank = module.tp_rank // module.num_kv_head_replicas  # more ranks than key heads: neighbours share one
        heads, key_heads = module.num_heads, module.num_kv_heads
        yield q, module.tp_rank * heads * module.head_size, heads * module.head_size
        yield k, key_rank * key_heads * module.head_size, key_heads * module.head_size
        yield v, key_rank * key_heads * module.v_head_size, key_heads * module.v_head_size
    elif isinstance(module, MergedColumnParallelLinear):
        assert len(parts) == len(module.output_sizes), f"{parts} for {len(module.output_sizes)} stacked parts"
        for part, size in zip(parts, module.output_sizes, strict=True):
            rows = size // module.tp_size
            yield part, module.tp_rank * rows, rows
    elif isinstance(module, VocabParallelEmbedding):
        assert module.num_added_embeddings == 0, "a vocabulary enlarged for LoRA"
        first, last = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        yield parts[0], first, last - first
    elif isinstance(module, ColumnParallelLinear):
        yield parts[0], module.tp_rank * len(data), len(data)
    else:
        assert len(parts) == 1, f"{type(module).__name__} stacks {parts}"
        yield parts[0], 0, len(data) if data.dim() else 0


def rows_piece(name: str, first: int, data: torch.Tensor) -> Piece:
    """Rows of a whole tensor, from `first` on."""
    if not data.dim():
        return Piece(name, (), (), data)
    rest = tuple(data.shape[1:])
    return Piece(name, (first, *(0 for _ in rest)), (first + len(data), *rest), data)


def columns_piece(name: str, data: torch.Tensor, tp_rank: int) -> Piece:
    """The columns of a whole matrix that are this tensor-parallel rank's."""
    rows, width = data.shape
    return Piece(name, (0, tp_rank * width), (rows, (tp_rank + 1) * width), data)


def _experts(prefix: str, layer: Any) -> Iterator[Piece]:
    """Experts e of a layer: ``w13[e]`` stacks gate and up, sharded by rows; ``w2[e]`` is down, sharded by columns."""
    backend = layer.quant_method.unquantized_backend.name
    if backend not in _NATURAL_EXPERTS:
        raise UserError(
            f"vLLM runs the experts of {prefix} on its backend {backend}, which rearranges their weights, so that they "
            f"cannot be written in place; it should be one of {', '.join(_NATURAL_EXPERTS)}"
        )
    config = layer.moe_config
    width, hidden, rank = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded, config.tp_rank
    w13, w2 = natural_experts(layer)
    block = prefix.removesuffix(".routed_experts")
    padded = w13.shape[1] // 2
    for expert in range(layer.global_num_experts):
        local = layer.expert_map_manager.map_global_to_local(expert)
        if local < 0:  # another rank's
            continue
        name = f"{block}.{expert}."
        gate, up = w13[local, :width, :hidden], w13[local, padded : padded + width, :hidden]
        yield rows_piece(f"{name}{layer.ckpt_gate_proj_name}.weight", rank * width, gate)
        yield rows_piece(f"{name}{layer.ckpt_up_proj_name}.weight", rank * width, up)
        yield columns_piece(f"{name}{layer.ckpt_down_proj_name}.weight", w2[local, :hidden, :width], rank)
