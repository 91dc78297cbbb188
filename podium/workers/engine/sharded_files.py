"""Sharded tensors in files: torch.distributed.checkpoint over safetensors, which, unlike its own format, run no code.

Each rank writes what it holds; any number of ranks reads it back, each what it needs.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    SavePlan,
)
from torch.distributed.tensor import DTensor

from podium.utils.errors import UserError
from podium.workers.engine.finite import require_finite

# The writer builds a file in memory before it writes it.
_FILE_BYTES = 2**31


def write_tensors(tensors: Mapping[str, torch.Tensor], path: str, group: Any = None) -> None:
    """Writes tensors (DTensors, or whole ones that all ranks hold alike). Every rank of `group` calls it.

    Args:
        group: of a backend for CPU tensors; the world where None.

    Raises:
        OSError: on all ranks alike, also where only one could not write, or holds a number that is not finite.
    """
    writer = HuggingFaceStorageWriter(path, fqn_to_index_mapping=_into_files(tensors), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            dcp.save(dict(tensors), storage_writer=writer, planner=_FinitePlanner(), process_group=group)
        except dcp.CheckpointException as error:
            rank, (first, _) = next(iter(error.failures.items()))
            raise OSError(f"rank {rank} could not write {path}: {type(first).__name__}: {first}") from error


class _FinitePlanner(DefaultSavePlanner):
    """Looks at the tensors before any rank writes."""

    def create_local_plan(self) -> SavePlan:
        require_finite(
            (name, tensor.to_local() if isinstance(tensor, DTensor) else tensor)
            for name, tensor in self.state_dict.items()
        )
        return super().create_local_plan()


def read_tensors(tensors: Mapping[str, torch.Tensor], path: str, group: Any = None) -> None:
    """Fills tensors in place from what `write_tensors` wrote. Every rank of `group` calls it.

    Raises:
        UserError: a tensor is not there, or of another shape.
    """
    reader = HuggingFaceStorageReader(path)
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in saved:
            raise UserError(f"{path} has no {name}: it is the checkpoint of another model")
        shape = getattr(saved[name], "size", None)
        if shape != tensor.shape:
            raise UserError(
                f"{path}: {name} has the shape {shape}, the model's is {tensor.shape}: it is of another model"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(dict(tensors), storage_reader=reader, process_group=group)


def _into_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The file, counted from 1, that each tensor goes to, alike on every rank."""
    files, filled, index = {}, 0, 1
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > _FILE_BYTES:
            filled, index = 0, index + 1
        filled += size
        files[name] = index
    return files
