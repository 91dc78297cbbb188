"""Checkpoints of a Megatron model and its optimizer, which any other layout can load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter

from podium.workers.engine.megatron_optim import MegatronAdam


def _reshardable() -> dict[str, Any]:
    """Optimizer state by parameter, not by the buffers of this layout.

    A new one each time: megatron-core keeps a process group in it, which would outlive its layout.
    """
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save(path: str, chunks: Sequence[Any], optimizer: MegatronAdam | None) -> None:
    """Writes weights, and optimizer and schedule where there are any, under `path`. Every rank calls it."""
    if torch.distributed.get_rank() == 0:
        Path(path).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    # An optimizer that has made no step has no state, and megatron-core takes that for a fault.
    state = _state(chunks, optimizer if optimizer is not None and optimizer.steps else None)
    state["steps"] = optimizer.steps if optimizer is not None else 0
    dist_checkpointing.save(state, path, _Writer("torch_dist", 1), content_metadata=_reshardable())


def load(path: str, chunks: Sequence[Any], optimizer: MegatronAdam | None) -> None:
    """Reads what `save` wrote in any layout of the same model. Every rank calls it."""
    steps = dist_checkpointing.load_common_state_dict(path)["steps"]
    wanted = _state(chunks, optimizer if steps else None, is_loading=True)
    state = dist_checkpointing.load(wanted, path)
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        chunk.load_state_dict(state[name])
    if optimizer is None:
        return
    if steps:
        optimizer.inner.load_state_dict(state["optimizer"])
    else:
        optimizer.inner.reload_model_params()
    for part in optimizer.inner.chained_optimizers:
        if not steps:
            part.optimizer.state.clear()
        for each in part.optimizer.state.values():
            if "step" in each:
                # megatron-core gives all parameters one counter, and torch's AdamW would advance it for each of them.
                each["step"] = each["step"].clone()
    optimizer.steps = steps
    optimizer.apply_schedule()


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


class _Writer(TorchDistSaveShardedStrategy):
    """megatron-core's format, written by torch's own writer.

    megatron-core's forks processes to write and keeps a server process for their answers, which a worker that is killed
    leaves behind.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch.distributed.checkpoint.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
