"""A Megatron pipeline stage as it lies in memory: the flat buffers that megatron-core trains in."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from podium.models.megatron.name_map import staged_pieces
from podium.utils.memory_buffer import FlatStage, MemoryBuffer, WeightBufferMeta

if TYPE_CHECKING:
    from podium.models.megatron.model import Chunk


def flat_stage(modules: Sequence["Chunk"], wrapped: Sequence[Any]) -> FlatStage:
    """This rank's stage where it is: in the parameter buffers of `wrapped`, one a dtype and virtual stage.

    Parameters of experts have a buffer of their own.

    Args:
        modules: the chunks of the model.
        wrapped: each of them in megatron-core's DistributedDataParallel.
    """
    meta: WeightBufferMeta = {}
    buffers: dict[str, MemoryBuffer] = {}
    for number, (module, chunk) in enumerate(zip(modules, wrapped, strict=True)):
        names = {parameter: f"{number}.{name}" for name, parameter in module.named_parameters()}
        for kind, buffer in enumerate([*chunk.buffers, *chunk.expert_parallel_buffers]):
            key, flat = f"{number}.{kind}", buffer.param_data
            buffers[key] = MemoryBuffer(len(flat), len(flat), flat.dtype, flat)
            for parameter, (start, _, _) in buffer.param_index_map.items():
                assert parameter.data_ptr() == flat[start:].data_ptr(), f"{names[parameter]} has left its buffer"
                meta[names[parameter]] = {"shape": parameter.shape, "dtype": flat.dtype, "buffer": key, "start": start}
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    return FlatStage(ranks, meta, buffers, partial(staged_pieces, modules[0]))
