"""Where each Megatron parameter lies in the Hugging Face checkpoint: one table, read in both directions.

A table names, for each parameter of megatron-core's layers, the checkpoint's tensors and the rule by which they make up
the parameter:

* ``same``: the tensor, whole on every rank;
* ``rows``, ``columns``: the tensor, split over tensor-parallel ranks along its first or second dimension;
* ``groups``: q, k and v, by rows: the heads of the first key-value group (its q's, then its k and v), then the next;
* ``gate_up``: gate and up, by rows: on each rank its part of gate, then its part of up.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from podium.models.megatron.config import ARCHITECTURES, head_dim
from podium.utils.memory_buffer import WeightBuffers, by_chunk, normalize_pp_vpp_params
from podium.utils.piece import Piece

if TYPE_CHECKING:
    from podium.models.megatron.model import Chunk

_ATTENTION = {
    "input_layernorm.weight": ("same", "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": ("groups", *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": ("groups", *(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": ("same", "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": ("same", "self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": ("columns", "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": ("same", "post_attention_layernorm.weight"),
}
_MLP = {
    "mlp.linear_fc1.weight": ("gate_up", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("columns", "mlp.down_proj.weight"),
}
_QWEN3_EXPERTS = {
    "mlp.router.weight": ("same", "mlp.gate.weight"),
    "mlp.experts.{e}.linear_fc1.weight": (
        "gate_up", "mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight",
    ),
    "mlp.experts.{e}.linear_fc2.weight": ("columns", "mlp.experts.{e}.down_proj.weight"),
}  # fmt: skip
_MIXTRAL_EXPERTS = {
    "mlp.router.weight": ("same", "block_sparse_moe.gate.weight"),
    "mlp.experts.{e}.linear_fc1.weight": (
        "gate_up", "block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight",
    ),
    "mlp.experts.{e}.linear_fc2.weight": ("columns", "block_sparse_moe.experts.{e}.w2.weight"),
}  # fmt: skip
_DENSE = {**_ATTENTION, **_MLP}
LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    **{name: _DENSE for name in ("llama", "mistral", "qwen2", "qwen3", "gemma")},
    "qwen3_moe": {**_ATTENTION, **_QWEN3_EXPERTS},
    "mixtral": {**_ATTENTION, **_MIXTRAL_EXPERTS},
}
"""By model_type: a layer's parameters, and the tensors below ``model.layers.N.``; ``{e}`` numbers experts globally."""
assert LAYERS.keys() == ARCHITECTURES.keys()

OUTSIDE: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings.weight": ("rows", "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": ("same", "model.norm.weight"),
    "output_layer.weight": ("rows", "lm_head.weight"),
}
_TIED = {**OUTSIDE, "output_layer.weight": OUTSIDE["embedding.word_embeddings.weight"]}
_VALUE = {**OUTSIDE, "output_layer.weight": ("same", "score.weight")}


@dataclass(frozen=True)
class Segment:
    """Consecutive rows (or columns) of a checkpoint's tensor."""

    name: str
    """Empty for rows that only round the vocabulary up, which the checkpoint lacks."""
    start: int
    stop: int


def segments(hf_config: Any, rule: str, names: Sequence[str], size: int, parts: int) -> list[Segment]:
    """What makes up a whole parameter of `size` rows (columns) that is split into `parts` equal parts, in order."""
    if rule == "groups":
        groups, width = hf_config.num_key_value_heads, head_dim(hf_config)
        rows = (hf_config.num_attention_heads // groups * width, width, width)
        return [
            Segment(name, group * count, (group + 1) * count)
            for group in range(groups)
            for name, count in zip(names, rows, strict=True)
        ]
    if rule == "gate_up":
        each = size // 2 // parts
        return [Segment(name, part * each, (part + 1) * each) for part in range(parts) for name in names]
    (name,) = names
    real = min(size, hf_config.vocab_size) if rule == "rows" else size
    return [Segment(name, 0, real), *([Segment("", real, size)] if real < size else [])]


def pieces(chunks: Sequence["Chunk"]) -> list[Piece]:
    """Every parameter of this rank as views under Hugging Face names, and the boxes that they fill.

    Rows that only round the vocabulary up are left out. A tied embedding that the last stage holds a copy of is a piece
    there as well. The views are of the parameters' memory now: a wrapper that moves parameters makes them stale.
    """
    return [piece for piece, _ in shaped_pieces(chunks)]


def staged_pieces(chunk: "Chunk", weight_buffers: WeightBuffers) -> list[Piece]:
    """`pieces` of this rank once it has the parameters of every pipeline stage, of which `chunk` is one; each box once.

    Args:
        weight_buffers: of ModuleLists of chunks, stage by stage; the experts are those of this rank.
    """
    named = normalize_pp_vpp_params(by_chunk(weight_buffers), chunk.hf_config.num_hidden_layers)
    first = _first_expert(chunk)
    found: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for name, tensor in named.items():
        for piece, _ in _pieces_of(chunk, _with_global_experts(name, first), tensor):
            found.setdefault((piece.name, piece.starts), piece)  # a tied head is a copy of the embedding
    return list(found.values())


def shaped_pieces(chunks: Sequence["Chunk"]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """`pieces`, each with the shape of its whole tensor."""
    for chunk in chunks:
        for name, parameter in global_parameters(chunk):
            yield from _pieces_of(chunk, name, parameter)


def global_parameters(chunk: "Chunk") -> Iterator[tuple[str, Any]]:
    """Parameters under megatron-core's names, with layers and experts by their number in the whole model."""
    first_expert = _first_expert(chunk)
    for name, parameter in chunk.named_parameters():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match:
            number = chunk.decoder.layers[int(match[1])].layer_number - 1
            name = _with_global_experts(f"decoder.layers.{number}.{match[2]}", first_expert)
        yield name, parameter


def _first_expert(chunk: "Chunk") -> int:
    from megatron.core import parallel_state

    if not chunk.config.num_moe_experts:
        return 0
    return parallel_state.get_expert_model_parallel_rank() * (chunk.config.num_moe_experts // chunk.layout.ep)


def _with_global_experts(name: str, first_expert: int) -> str:
    return re.sub(r"local_experts\.(\d+)\.", lambda expert: f"{first_expert + int(expert[1])}.", name)


def _pieces_of(chunk: "Chunk", name: str, parameter: Any) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    from megatron.core import parallel_state

    rule, names = _lookup(chunk, name)
    tensor = parameter.data
    if rule == "same":
        yield Piece(names[0], (0,) * tensor.dim(), tuple(tensor.shape), tensor), tuple(tensor.shape)
        return
    if ".experts." in name:
        parts, rank = chunk.layout.expert_tp, parallel_state.get_expert_tensor_parallel_rank()
    else:
        parts, rank = chunk.layout.tp, parallel_state.get_tensor_model_parallel_rank()
    dim = 1 if rule == "columns" else 0
    own = tensor.shape[dim]
    whole = segments(chunk.hf_config, rule, names, own * parts, parts)
    sizes = {segment.name: segment.stop for segment in whole}  # of each tensor, the last segment ends it
    for segment, offset in _part_of(whole, rank * own, own):
        if segment.name:
            starts, stops, shape = [0] * tensor.dim(), list(tensor.shape), list(tensor.shape)
            starts[dim], stops[dim], shape[dim] = segment.start, segment.stop, sizes[segment.name]
            view = tensor.narrow(dim, offset, segment.stop - segment.start)
            yield Piece(segment.name, tuple(starts), tuple(stops), view), tuple(shape)


def _part_of(whole: list[Segment], start: int, size: int) -> Iterator[tuple[Segment, int]]:
    """The segments, cut to rows start..start + size of what they make up, and where each begins there."""
    position = 0
    for segment in whole:
        low, high = max(position, start), min(position + segment.stop - segment.start, start + size)
        if low < high:
            shift = segment.start - position
            yield Segment(segment.name, low + shift, high + shift), low - start
        position += segment.stop - segment.start


def _lookup(chunk: "Chunk", name: str) -> tuple[str, list[str]]:
    """Rule and tensors of a parameter, whose name is global."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if not match:
        table = _VALUE if chunk.value_head else _TIED if chunk.hf_config.tie_word_embeddings else OUTSIDE
        rule, *names = table[name]
        return rule, names
    layer, rest = match.groups()
    expert = re.search(r"experts\.(\d+)\.", rest)
    key = re.sub(r"experts\.\d+\.", "experts.{e}.", rest)
    rule, *names = LAYERS[chunk.hf_config.model_type][key]
    number = expert[1] if expert else ""
    return rule, [f"model.layers.{layer}." + part.replace("{e}", number) for part in names]
