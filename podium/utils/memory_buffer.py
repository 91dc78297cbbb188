"""Parameters as views of flat memory: one buffer a dtype, each parameter at a 128-bit boundary of it.

What is flat travels in one message, moves between devices in one copy, and is cast or zeroed in one kernel. Names are
those that verl's users know.
"""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from podium.utils.device import device
from podium.utils.piece import Piece

ALIGNMENT = 16
"""Bytes (128 bits): the widest load or store of a GPU thread, for which a parameter's start must be aligned."""

WeightBufferMeta = dict[str, dict[str, Any]]
"""Name of a parameter -> its ``shape`` (torch.Size) and ``dtype``, in the order in which they lie in memory.

Of memory that somebody else laid out, also the ``buffer`` that it lies in and the element at which it ``start``s there;
otherwise there is one buffer a dtype, whose key is the dtype.
"""

MemoryBuffers = Mapping[Any, "MemoryBuffer"]
"""Buffers by key: the dtype, or what the parameters' ``buffer`` says."""

WeightBuffers = list[dict[str, torch.Tensor]]
"""For each pipeline stage, its parameters by name. Where a stage has several chunks (virtual stages), names begin with
the chunk's number and a dot, as in a ModuleList of them."""
StageParams = list[list[dict[str, torch.Tensor]]]
"""Parameters by [pipeline stage][chunk][name in the chunk]."""


class MemoryBuffer:
    """Flat memory of one dtype, from which views are cut.

    Args:
        numel: elements, with the padding between parameters.
        numel_padded: elements to allocate, `numel` or more.
        source: memory to use, of `numel_padded` elements; None allocates zeros on this rank's device.
    """

    def __init__(self, numel: int, numel_padded: int, dtype: torch.dtype, source: torch.Tensor | None = None):
        assert numel <= numel_padded, f"{numel} elements in {numel_padded}"
        if source is None:
            source = torch.zeros(numel_padded, dtype=dtype, device=device())
        assert source.shape == (numel_padded,) and source.dtype == dtype, f"{tuple(source.shape)} {source.dtype}"
        self.numel, self.numel_padded, self.dtype, self.data = numel, numel_padded, dtype, source

    def zero(self) -> None:
        """Sets everything to 0."""
        self.data.zero_()

    def get(self, shape: torch.Size, start_index: int) -> torch.Tensor:
        """A view of `shape` that begins at element `start_index`."""
        stop = start_index + shape.numel()
        assert stop <= self.numel, f"elements {start_index} to {stop} of {self.numel}"
        return self.data[start_index:stop].view(shape)


def calc_padded_numel(shape: torch.Size, dtype: torch.dtype) -> int:
    """Elements that a tensor takes up in a buffer: rounded up to 128 bits, of any dtype."""
    elements = max(1, ALIGNMENT // dtype.itemsize)
    return -(-shape.numel() // elements) * elements


def get_weight_buffer_meta_from_module(module: torch.nn.Module) -> WeightBufferMeta:
    """Shapes and dtypes of a module's parameters, by name in alphabetical order. A shared parameter counts once."""
    return {name: {"shape": p.shape, "dtype": p.dtype} for name, p in sorted(module.named_parameters())}


def build_memory_buffer(weight_buffer_meta: WeightBufferMeta) -> dict[Any, MemoryBuffer]:
    """A zeroed buffer for each dtype (or each ``buffer`` that is named), large enough for its parameters."""
    sizes = _sizes(weight_buffer_meta)
    return {key: MemoryBuffer(numel, numel, dtype) for key, (dtype, numel) in sizes.items()}


def build_memory_reference(
    weight_buffer_meta: WeightBufferMeta, memory_buffers: MemoryBuffers
) -> dict[str, torch.Tensor]:
    """Each parameter as a view of the buffers that `build_memory_buffer` made for the same `weight_buffer_meta`."""
    return {
        name: memory_buffers[key].get(meta["shape"], start) for name, meta, key, start in _places(weight_buffer_meta)
    }


@torch.no_grad()
def build_memory_reference_from_module(
    module: torch.nn.Module, memory_buffers: MemoryBuffers, maintain_weight: bool = True
) -> None:
    """Makes a module's parameters views of buffers that were built for its `get_weight_buffer_meta_from_module`.

    The parameters stay the same objects, so an optimizer that has them goes on.

    Args:
        maintain_weight: keep the parameters' values; otherwise they become what the buffers hold.
    """
    meta = get_weight_buffer_meta_from_module(module)
    parameters = dict(module.named_parameters())
    for name, view in build_memory_reference(meta, memory_buffers).items():
        if maintain_weight:
            view.copy_(parameters[name])
        parameters[name].data = view


def _places(weight_buffer_meta: WeightBufferMeta) -> Iterator[tuple[str, dict[str, Any], Hashable, int]]:
    """The buffer that each parameter lies in, and where it begins there."""
    ends: dict[Hashable, int] = {}
    for name, meta in weight_buffer_meta.items():
        key = meta.get("buffer", meta["dtype"])
        start = meta.get("start", ends.get(key, 0))
        yield name, meta, key, start
        ends[key] = start + calc_padded_numel(meta["shape"], meta["dtype"])


def _sizes(weight_buffer_meta: WeightBufferMeta) -> dict[Hashable, tuple[torch.dtype, int]]:
    """Dtype and elements of each buffer."""
    sizes: dict[Hashable, tuple[torch.dtype, int]] = {}
    for _, meta, key, start in _places(weight_buffer_meta):
        end = start + calc_padded_numel(meta["shape"], meta["dtype"])
        sizes[key] = meta["dtype"], max(end, sizes.get(key, (None, 0))[1])
    return sizes


@dataclass(frozen=True)
class FlatStage:
    """A pipeline stage of a trainer as it lies in flat memory, and what the memory of all its stages means."""

    ranks: tuple[int, ...]
    """Of the world: those that hold the stages of this rank's pipeline, in order."""
    meta: WeightBufferMeta
    """Where this rank's parameters lie in `buffers`, under their names in a ModuleList of chunks."""
    buffers: MemoryBuffers
    transform: Callable[["WeightBuffers"], list[Piece]]
    """From the parameters of all stages to pieces of whole tensors: views, each box once."""


class MegatronMemoryBufferForRollout:
    """Flat buffers of each pipeline stage, one a dtype, and the parameters in them under the rollout's names.

    `memory_buffers`, `weight_buffers` and `named_parameters` look at the same storage. This rank's own stage is used
    where it is: the trainer's flat memory; the others' are there only from `build_memory_reference` to `release`.

    Args:
        transform_memory_param_fn: gives the rollout's parameters by name, views wherever there is one, from the
            weight buffers of all stages.
    """

    def __init__(self, transform_memory_param_fn: Callable[[WeightBuffers], dict[str, torch.Tensor]]):
        self._transform = transform_memory_param_fn
        self._metas: list[WeightBufferMeta] = []
        self._own: MemoryBuffers = {}
        self._own_stage = -1
        self._memory_buffers: list[dict[Any, MemoryBuffer]] = []
        self._weight_buffers: WeightBuffers = []
        self._named_parameters: dict[str, torch.Tensor] = {}

    def initialize_weight_buffer(
        self,
        weight_buffer_meta_pp: Sequence[WeightBufferMeta],
        own_stage: int = -1,
        own_buffers: MemoryBuffers | None = None,
    ) -> None:
        """Says what lies on each stage; allocates nothing.

        Args:
            weight_buffer_meta_pp: for each stage, what `get_weight_buffer_meta_from_module` says of it, or a trainer
                that laid it out otherwise.
            own_stage, own_buffers: this rank's stage and its memory, which is used and not copied; -1: all is foreign.
        """
        assert (own_stage >= 0) == (own_buffers is not None), "a stage of one's own, and where it is"
        self.release()
        self._metas, self._own_stage, self._own = list(weight_buffer_meta_pp), own_stage, own_buffers or {}

    def build_memory_reference(self) -> None:
        """Allocates the foreign stages and makes the views of all."""
        self._memory_buffers = [
            dict(self._own) if stage == self._own_stage else build_memory_buffer(meta)
            for stage, meta in enumerate(self._metas)
        ]
        self._weight_buffers = [
            build_memory_reference(meta, buffers)
            for meta, buffers in zip(self._metas, self._memory_buffers, strict=True)
        ]
        self._named_parameters = self._transform(self._weight_buffers)

    def allgather_params(self, group: Any) -> list[tuple[int, Any]]:
        """Starts one broadcast for each flat buffer; returns the handles to wait for, each with its stage.

        Args:
            group: the pipeline's; its rank s has stage s.
        """
        return [
            (stage, dist.broadcast(flat, group=group, group_src=stage, async_op=True))
            for stage in range(len(self._metas))
            for flat in self.flat(stage)
        ]

    def flat(self, stage: int) -> list[torch.Tensor]:
        """The memory of a stage: its buffers, in an order that all ranks share, up to the end of the last parameter."""
        sizes, buffers = _sizes(self._metas[stage]), self._memory_buffers[stage]
        return [buffers[key].data[: sizes[key][1]] for key in sorted(buffers, key=str)]

    def get_all_params(self) -> StageParams:
        """The parameters of all stages, by [stage][chunk][name]."""
        return by_chunk(self._weight_buffers)

    def release(self) -> None:
        """Frees the foreign stages; nothing may use the views any more."""
        self._memory_buffers, self._weight_buffers, self._named_parameters = [], [], {}

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """The rollout's parameters by name."""
        return self._named_parameters

    @property
    def weight_buffers(self) -> WeightBuffers:
        """For each stage, its parameters under the trainer's names."""
        return self._weight_buffers

    @property
    def memory_buffers(self) -> list[dict[Any, MemoryBuffer]]:
        """For each stage, its flat memory by dtype (or by the trainer's ``buffer``)."""
        return self._memory_buffers


def by_chunk(weight_buffers: WeightBuffers) -> StageParams:
    """Takes the chunks' numbers out of the names."""
    params: StageParams = []
    for weights in weight_buffers:
        chunks: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in weights.items():
            number, _, inner = name.partition(".")
            chunk, inner = (int(number), inner) if number.isdigit() else (0, name)
            chunks.setdefault(chunk, {})[inner] = tensor
        params.append([chunks[number] for number in sorted(chunks)])
    return params


def normalize_pp_vpp_params(
    params: Sequence[Sequence[Mapping[str, torch.Tensor]]], num_hidden_layers: int, layer_name: str = "layers"
) -> dict[str, torch.Tensor]:
    """The parameters of all stages in one dict, layers under their numbers in the whole model.

    Chunk c of every stage, stage by stage, comes before chunk c + 1 of any. Stages may have different numbers of
    layers, none included.

    Args:
        params: by [stage][chunk][name]; a layer's name holds ``<layer_name>.<number in the chunk>.``.

    Raises:
        ValueError: the layers are not `num_hidden_layers` in all, are not numbered without gaps, or a name comes twice.
    """
    pattern = re.compile(rf"(^|\.){re.escape(layer_name)}\.(\d+)\.")
    result: dict[str, torch.Tensor] = {}
    first = 0
    for chunk, stage in ((c, s) for c in range(max(map(len, params), default=0)) for s in range(len(params))):
        if chunk >= len(params[stage]):
            raise ValueError(f"stage {stage} has {len(params[stage])} chunks, another has more than {chunk}")
        numbers: set[int] = set()
        for name, tensor in params[stage][chunk].items():
            match = pattern.search(name)
            if match:
                numbers.add(int(match[2]))
                name = f"{name[: match.start(2)]}{first + int(match[2])}{name[match.end(2) :]}"
            if name in result:
                raise ValueError(f"{name} is on two stages, one of them {stage}")
            result[name] = tensor
        if numbers != set(range(len(numbers))):
            raise ValueError(f"stage {stage}, chunk {chunk} has layers {sorted(numbers)}: expected 0 and on, no gaps")
        first += len(numbers)
    if first != num_hidden_layers:
        raise ValueError(f"the stages have {first} layers, the model {num_hidden_layers}")
    return result
