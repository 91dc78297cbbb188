"""Parameters as views of flat memory: one buffer a dtype, each parameter at a 128-bit boundary of it.

What is flat travels in one message, moves between devices in one copy, and is cast or zeroed in one kernel. Names are
those that verl's users know.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from podium.utils.device import device

ALIGNMENT = 16
"""Bytes (128 bits): the widest load or store of a GPU thread, for which a parameter's start must be aligned."""

WeightBufferMeta = dict[str, dict[str, Any]]
"""Name of a parameter -> its ``shape`` (torch.Size) and ``dtype``, in the order in which they lie in memory."""

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


def build_memory_buffer(weight_buffer_meta: WeightBufferMeta) -> dict[torch.dtype, MemoryBuffer]:
    """A zeroed buffer for each dtype, large enough for its parameters."""
    sizes: dict[torch.dtype, int] = {}
    for meta in weight_buffer_meta.values():
        sizes[meta["dtype"]] = sizes.get(meta["dtype"], 0) + calc_padded_numel(meta["shape"], meta["dtype"])
    return {dtype: MemoryBuffer(numel, numel, dtype) for dtype, numel in sizes.items()}


def build_memory_reference(
    weight_buffer_meta: WeightBufferMeta, memory_buffers: Mapping[torch.dtype, MemoryBuffer]
) -> dict[str, torch.Tensor]:
    """Each parameter as a view of the buffers that `build_memory_buffer` made for the same `weight_buffer_meta`."""
    return {
        name: memory_buffers[meta["dtype"]].get(meta["shape"], start)
        for name, meta, start in _places(weight_buffer_meta)
    }


@torch.no_grad()
def build_memory_reference_from_module(
    module: torch.nn.Module, memory_buffers: Mapping[torch.dtype, MemoryBuffer], maintain_weight: bool = True
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


def _places(weight_buffer_meta: WeightBufferMeta) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Where each parameter begins in the buffer of its dtype."""
    starts: dict[torch.dtype, int] = {}
    for name, meta in weight_buffer_meta.items():
        start = starts.get(meta["dtype"], 0)
        yield name, meta, start
        starts[meta["dtype"]] = start + calc_padded_numel(meta["shape"], meta["dtype"])


class MegatronMemoryBufferForRollout:
    """One flat buffer for each pipeline stage and dtype, and the parameters in them under the rollout's names.

    `memory_buffers`, `weight_buffers` and `named_parameters` look at the same storage. This rank's own stage is used
    where it is: the trainer's flat memory; the others' are there only from `build_memory_reference` to `release`.

    Args:
        transform_memory_param_fn: gives the rollout's parameters by name, views wherever there is one, from the
            weight buffers of all stages.
    """

    def __init__(self, transform_memory_param_fn: Callable[[WeightBuffers], dict[str, torch.Tensor]]):
        self._transform = transform_memory_param_fn
        self._metas: list[WeightBufferMeta] = []
        self._own: Mapping[torch.dtype, MemoryBuffer] = {}
        self._own_stage = -1
        self._memory_buffers: list[dict[torch.dtype, MemoryBuffer]] = []
        self._weight_buffers: WeightBuffers = []
        self._named_parameters: dict[str, torch.Tensor] = {}

    def initialize_weight_buffer(
        self,
        weight_buffer_meta_pp: Sequence[WeightBufferMeta],
        own_stage: int = -1,
        own_buffers: Mapping[torch.dtype, MemoryBuffer] | None = None,
    ) -> None:
        """Says what lies on each stage; allocates nothing.

        Args:
            weight_buffer_meta_pp: for each stage, what `get_weight_buffer_meta_from_module` says of it.
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

    def allgather_params(self, group: Any) -> list[Any]:
        """Starts one broadcast for each stage and dtype; returns their handles, to wait for.

        Args:
            group: the pipeline's; its rank s has stage s.
        """
        return [
            dist.broadcast(buffers[dtype].data, group=group, group_src=stage, async_op=True)
            for stage, buffers in enumerate(self._memory_buffers)
            for dtype in sorted(buffers, key=str)
        ]

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
    def memory_buffers(self) -> list[dict[torch.dtype, MemoryBuffer]]:
        """For each stage, its flat memory by dtype."""
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
