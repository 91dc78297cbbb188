"""Checkpoints of a Megatron model and its optimizer, which any other layout can load.

megatron-core says which box of which whole tensor each rank holds; its own files, which hold pickles, are not used.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

from podium.utils.checkpoint import write_synced
from podium.workers.engine.box_files import TensorBox, read_boxes, write_boxes
from podium.workers.engine.megatron_optim import MegatronAdam

_SCHEDULE = "schedule.json"


def _reshardable() -> dict[str, Any]:
    """Optimizer state by parameter, not by the buffers of this layout.

    A new one each time: megatron-core keeps a process group in it, which would outlive its layout.
    """
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def snapshot(chunks: Sequence[Any], optimizer: MegatronAdam | None, copy: bool = True) -> Callable[[str, Any], None]:
    """What a checkpoint holds of this rank, as a function that writes it. Every rank calls both.

    Args:
        copy: the function may be called on another thread, while training goes on.

    Returns:
        A function of a directory, and of a process group for CPU tensors that its ranks meet in; it returns on no rank
        before all have written, and raises OSError on all alike.
    """
    # An optimizer that has made no step has no state, and megatron-core takes that for a fault.
    state = _state(chunks, optimizer if optimizer is not None and optimizer.steps else None)
    sharded, _, _ = load_preprocess(state)
    steps = optimizer.steps if optimizer is not None else 0
    boxes = [_box(tensor) for tensor in _sharded(sharded) if is_main_replica(tensor.replica_id)]
    if copy:
        boxes = [TensorBox(b.name, b.shape, b.starts, b.tensor.detach().clone().cpu()) for b in boxes]
    return lambda path, group: _write(Path(path), boxes, steps, group)


def load(path: str, chunks: Sequence[Any], optimizer: MegatronAdam | None) -> None:
    """Reads what `snapshot` wrote in any layout of the same model. Every rank calls it."""
    steps = json.loads((Path(path) / _SCHEDULE).read_text(encoding="utf-8"))["steps"]
    state, _, factories = load_preprocess(_state(chunks, optimizer if steps else None, is_loading=True))
    tensors = list(_sharded(state))
    for tensor in tensors:  # into memory of its own: the optimizer's boxes are views of what it is about to read
        tensor.data = torch.empty_like(tensor.data, device="cpu")
    read_boxes([_box(tensor) for tensor in tensors], Path(path))
    dict_list_map_inplace(
        lambda value: value.data if isinstance(value, ShardedTensor | ShardedObject) else value, state
    )
    apply_factory_merges(state, factories)
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        chunk.load_state_dict(state[name])
    if optimizer is not None:
        _load_optimizer(optimizer, state.get("optimizer"), steps)


def _load_optimizer(optimizer: MegatronAdam, state: Any, steps: int) -> None:
    parts = optimizer.inner.chained_optimizers
    if steps:
        for each in [state] if len(parts) == 1 else state.values():
            for group in each["optimizer"]["param_groups"]:
                group["step"] = steps
        optimizer.inner.load_state_dict(state)
    else:
        optimizer.inner.reload_model_params()
    for part in parts:
        if not steps:
            part.optimizer.state.clear()
        for each in part.optimizer.state.values():
            if "step" in each:
                # megatron-core gives all parameters one counter, and torch's AdamW would advance it for each of them.
                each["step"] = each["step"].clone()
    optimizer.steps = steps
    optimizer.apply_schedule()


def _write(path: Path, boxes: Sequence[TensorBox], steps: int, group: Any) -> None:
    rank, failure = torch.distributed.get_rank(), ""
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_boxes(boxes, path, rank)
        if rank == 0:
            write_synced(path / _SCHEDULE, json.dumps({"steps": steps}) + "\n")
    except OSError as error:
        failure = f"rank {rank} could not write {path}: {error}"
    failures: list[Any] = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(failures, failure, group=group)
    if any(failures):
        raise OSError(next(filter(None, failures)))


def _state(chunks: Sequence[Any], optimizer: MegatronAdam | None, is_loading: bool = False) -> dict[str, Any]:
    state = {
        name: chunk.sharded_state_dict(metadata=_reshardable())
        for name, chunk in zip(_names(chunks), chunks, strict=True)
    }
    if optimizer is not None:
        state["optimizer"] = optimizer.inner.sharded_state_dict(state, is_loading=is_loading, metadata=_reshardable())
    return state


def _names(chunks: Sequence[Any]) -> list[str]:
    """megatron-core's optimizers expect these."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _sharded(state: Any) -> Iterator[ShardedTensor]:
    for value in nested_values(state):
        # Modules of Transformer Engine would have a state beside their tensors; those used here have none.
        assert not isinstance(value, ShardedObject) or value.data is None, f"{value} is no tensor"
        if isinstance(value, ShardedTensor):
            yield value


def _box(tensor: ShardedTensor) -> TensorBox:
    shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    return TensorBox(
        tensor.key,
        tuple(tensor.global_shape),
        tuple(tensor.global_offset),
        tensor.data.view(shape),
        tensor.allow_shape_mismatch,
    )
