"""The FSDP2 engine: parameters, gradients and optimizer state sharded over all ranks (ZeRO-3), on CUDA or CPU."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from podium.models.hf import disable_dropout, transformer_blocks, write_hf
from podium.models.hf_layout import checkpoint_pieces
from podium.models.lora import ADAPTER_FOLDER, Adapter
from podium.utils.checkpoint import write_synced
from podium.utils.device import device, init_distributed
from podium.utils.errors import UserError
from podium.utils.out_of_memory import micro_batch_of
from podium.utils.piece import Piece
from podium.utils.torch_functional import Denominator
from podium.workers.engine.base import (
    EmptyBatchError,
    LossFn,
    NonFiniteError,
    Placement,
    Tensors,
    TrainEngine,
    accumulate,
    reduce_metrics,
)
from podium.workers.engine.offload import Part, needs
from podium.workers.engine.optim import build_optimizer, build_scheduler, set_schedule
from podium.workers.engine.sharded_files import read_tensors, write_tensors

Forward = Callable[[torch.nn.Module, Tensors], Tensors]

_SCHEDULE = "schedule.json"
_FROZEN = "frozen_checksum"
_LOSS = "@loss"  # among the metrics while they are reduced


class FSDPEngine(TrainEngine):
    """A Hugging Face model under `fully_shard`.

    Args:
        module: the whole model on the CPU, in the precision of its master weights.
        forward: per-token outputs of a micro-batch (see `podium.workers.engine.forward`).
        fsdp_config: has ``dtype`` and ``reshard_after_forward``.
        optim_config: None for a model that is never trained.
        total_steps: optimizer steps of the whole run, for the schedule.
        grad_clip: largest global gradient norm.
        adapter: what was added to the module, which is then all that is trained.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Forward,
        fsdp_config: Any,
        optim_config: Any | None = None,
        total_steps: int = 1,
        grad_clip: float = 1.0,
        adapter: Adapter | None = None,
    ):
        super().__init__()
        init_distributed()
        self._mesh = init_device_mesh(device().type, (torch.distributed.get_world_size(),))
        self._forward = forward
        self._grad_clip, self._adapter = grad_clip, adapter
        self._writers: Any = None
        self._module = self._shard(module, fsdp_config)
        self._optimizer, self._scheduler = None, None
        if optim_config is not None:
            self._optimizer = build_optimizer(self._module.named_parameters(), optim_config)
            self._scheduler = build_scheduler(self._optimizer, optim_config, total_steps)
        self.rest(fsdp_config)

    def memory(self, part: Part) -> list[torch.Tensor]:
        if part == "params":
            self._reshard()
            return [_local(parameter) for parameter in self._module.parameters()]
        if part == "grads" or self._optimizer is None:  # gradients end with the step
            return []
        state = (value for each in self._optimizer.state.values() for value in each.values())
        return [_local(value) for value in state if value.dim()]

    def _shard(self, module: torch.nn.Module, config: Any) -> torch.nn.Module:
        disable_dropout(module)
        compute = getattr(torch, config.dtype)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        options = {"mesh": self._mesh, "mp_policy": policy, "reshard_after_forward": config.reshard_after_forward}
        for block in transformer_blocks(module):
            fully_shard(block, **options)
        fully_shard(module, **options)
        return module.to(device())

    @property
    def placement(self) -> Placement:
        return Placement(torch.distributed.get_rank(), answers=True)

    @property
    def _dp_size(self) -> int:
        return self._mesh.size()

    @needs("params")
    def infer(self, batch: Tensors, micro_batch_size: int) -> Tensors:
        self._module.eval()
        with torch.no_grad():
            parts = [self._infer(micro) for micro in _micro_batches(batch, micro_batch_size)]
        valid = batch["response_mask"].bool().to(device())
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {name: torch.where(valid, value, 0.0).cpu() for name, value in whole.items()}

    def _infer(self, micro: Tensors) -> Tensors:
        with micro_batch_of(partial(_size, micro)):
            return self._forward(self._module, micro)

    @needs("params", "optimizer")
    def train(self, batch: Tensors, loss_fn: LossFn, micro_batch_size: int) -> dict[str, float]:
        assert self._optimizer is not None and self._scheduler is not None
        self._module.train()
        self._optimizer.zero_grad()  # a call that failed half-way leaves the gradients of its first micro-batches
        denominator = self._count(batch["response_mask"])
        if denominator.tokens == 0:
            raise EmptyBatchError("no valid token in the mini-batch: no update was made")
        metrics: Tensors = {}
        for micro in _micro_batches(batch, micro_batch_size):
            with micro_batch_of(partial(_size, micro)):
                loss, part = loss_fn(self._forward(self._module, micro), micro, denominator)
                # The loss is this rank's share of the mini-batch's and FSDP averages gradients: undo the average.
                (loss * self._dp_size).backward()
            accumulate(metrics, {**part, _LOSS: loss})
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._grad_clip)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        reduced = reduce_metrics(metrics, self._mesh.get_group())
        total = reduced.pop(_LOSS)
        if not (math.isfinite(grad_norm) and math.isfinite(total)):
            self._optimizer.zero_grad()
            raise NonFiniteError(f"loss is {total} and gradient norm is {grad_norm}: no update was made")
        lr = float(self._scheduler.get_last_lr()[0])
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return {**reduced, "grad_norm": grad_norm, "lr": lr}

    def _count(self, response_mask: torch.Tensor) -> Denominator:
        """Valid tokens and sequences of the mini-batch over all ranks."""
        local = Denominator.from_mask(response_mask)
        counts = torch.tensor([local.tokens, local.sequences], dtype=torch.float64, device=device())
        torch.distributed.all_reduce(counts, group=self._mesh.get_group())
        return Denominator(*counts.tolist())

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        with self.phase("params"):
            yield from self._export(dtype)

    def _export(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        config: Any = self._module.config
        for name, parameter in self._weights():
            # Cast before gathering: half the bytes on the wire for bfloat16.
            whole = _whole(parameter.detach().to(dtype))
            for piece in checkpoint_pieces(config.model_type, [(name, (0,) * whole.dim(), whole)]):
                yield piece.name, piece.tensor

    @needs("params")
    def pieces(self) -> list[Piece]:
        return self._pieces(self._weights())

    @needs("params")
    def adapter_pieces(self) -> list[Piece]:
        assert self._adapter is not None, "the model has no adapter"
        self._reshard()
        return self._pieces(self._adapter.factors())

    def _pieces(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[Piece]:
        config: Any = self._module.config
        return checkpoint_pieces(config.model_type, [(name, *_local_shard(tensor)) for name, tensor in named])

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a model without adapters that computes the same, sharded as this rank holds them."""
        self._reshard()
        return self._module.named_parameters() if self._adapter is None else self._adapter.merged()

    def adapter_off(self) -> AbstractContextManager[None]:
        assert self._adapter is not None, "the model has no adapter"
        return self._adapter.off()

    def _reshard(self) -> None:
        """Puts the master weights back in place.

        Without ``reshard_after_forward``, a forward that no backward follows leaves the gathered parameters in the
        module, in the precision of the forward.
        """
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @needs("params", "optimizer")
    def save(self, path: str) -> None:
        self._write(path, *self._state())

    @needs("params", "optimizer")
    def snapshot(self) -> Callable[[str], None]:
        if self._writers is None:  # background writing meets in a group of its own, out of the way of the training's
            self._writers = torch.distributed.new_group(backend="gloo")
        tensors, schedule = self._state()
        copies = {name: tensor.detach().clone().cpu() for name, tensor in tensors.items()}
        return lambda path: self._write(path, copies, schedule, self._writers)

    def _write(self, path: str, tensors: Tensors, schedule: dict[str, Any], group: Any = None) -> None:
        if self._is_writer():
            Path(path).mkdir(parents=True, exist_ok=True)
            write_synced(Path(path) / _SCHEDULE, json.dumps(schedule) + "\n")
        write_tensors(tensors, path, group)  # last: it returns when all ranks have written

    def state_bytes(self) -> int:
        trained = self._saved_parameters().values()
        local = sum(_local_shard(parameter)[1].nbytes for parameter in trained)
        return local * (3 if self._optimizer is not None else 1)  # AdamW's two moments

    @needs("params", "optimizer")
    def load(self, path: str) -> None:
        model, optimizer = self._model_and_optimizer()
        tensors, now = self._flat(model, optimizer)
        saved = json.loads((Path(path) / _SCHEDULE).read_text(encoding="utf-8"))
        if saved.get(_FROZEN) != now.get(_FROZEN):
            raise UserError(f"{path}: its adapters were trained on another base than the model that was loaded")
        read_tensors(tensors, path)
        set_state_dict(self._module, self._optimizers(), model_state_dict=model, optim_state_dict=optimizer)
        if self._scheduler is not None:
            # The position alone: the rates follow from it and the configuration, which may have changed.
            set_schedule(self._scheduler, saved["last_epoch"])

    def _state(self) -> tuple[Tensors, dict[str, Any]]:
        """Every tensor that training changes, by name, and the position in the schedule."""
        return self._flat(*self._model_and_optimizer())

    def _flat(self, model: dict[str, Any], optimizer: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        # Tied weights are one parameter under two names: the first stands for both.
        all_names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        left_out = all_names - self._saved_parameters().keys()
        tensors = {f"model.{name}": tensor for name, tensor in model.items() if name not in left_out}
        for name, state in optimizer.get("state", {}).items():
            tensors.update((f"optimizer.{name}.{key}", value) for key, value in state.items())
        schedule = {"last_epoch": self._scheduler.last_epoch} if self._scheduler is not None else {}
        return tensors, schedule | ({_FROZEN: self._frozen_checksum} if self._adapter is not None else {})

    def _saved_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What a checkpoint has of the model: all of it, or what an adapter trains."""
        named = dict(self._module.named_parameters())
        return named if self._adapter is None else {name: named[name] for name in sorted(self._adapter.trained)}

    @cached_property
    def _frozen_checksum(self) -> int:
        """Of the weights that a checkpoint leaves out, alike for any number of ranks. A collective."""
        saved = self._saved_parameters()
        frozen = [_local_shard(p)[1] for name, p in self._module.named_parameters() if name not in saved]
        integers = {2: torch.int16, 4: torch.int32}
        sums = [shard.view(integers[shard.element_size()]).sum(dtype=torch.int64) for shard in frozen]
        total = torch.stack([(place + 1) * each for place, each in enumerate(sums)]).sum()
        torch.distributed.all_reduce(total, group=self._mesh.get_group())
        return int(total)

    def _model_and_optimizer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self._reshard()
        fresh = self._optimizer is not None and not self._optimizer.state
        model, optimizer = get_state_dict(self._module, self._optimizers())
        if fresh and self._optimizer is not None:
            # torch makes the state that a new optimizer lacks by a step at learning rate 0. Counted, it would change
            # the bias correction of every later step.
            for state in self._optimizer.state.values():
                state["step"].zero_()
        return model, optimizer

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._optimizer] if self._optimizer is not None else []

    @needs("params")
    def save_hf(self, path: str) -> None:
        self._reshard()
        dtype = next(self._module.parameters()).dtype
        whole = {name: _exactly(tensor.cpu()) for name, tensor in self.export(dtype) if self._is_writer()}
        trained = {}
        if self._adapter is not None:
            trained = {name: _exactly(_whole(p.detach()).cpu()) for name, p in self._saved_parameters().items()}
        try:
            if self._is_writer():
                module: Any = self._module
                plain_name = type(module).__name__.removeprefix("FSDP")
                architecture = getattr(module, "hf_architecture", plain_name)
                write_hf(path, whole, module.config, architecture, getattr(module, "generation_config", None))
                if self._adapter is not None:
                    self._adapter.save(Path(path) / ADAPTER_FOLDER, trained, module.config.name_or_path)
        finally:  # also where writing fails: the other ranks wait here
            torch.distributed.barrier()

    def _is_writer(self) -> bool:
        return torch.distributed.get_rank() == 0


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathered, where it is sharded: a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local_shard(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Where this rank's part of a parameter starts, and that part: rows, in chunks of which the last may be shorter."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim(), _local(parameter)
    _, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(starts), _local(parameter)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor that may be distributed."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _exactly(tensor: torch.Tensor) -> torch.Tensor:
    """Without the padding that gathering uneven shards leaves behind a tensor, and which safetensors refuses."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _size(micro: Tensors) -> tuple[int, int, int]:
    """Rows, tokens, and the width of a row with padding."""
    rows, width = micro["input_ids"].shape
    return rows, int(micro["attention_mask"].sum()), width


def _micro_batches(batch: Tensors, size: int) -> Iterator[Tensors]:
    """Consecutive slices of `size` rows (the last may be shorter), on this rank's device."""
    rows = len(batch["input_ids"])
    for start in range(0, rows, size):
        yield {name: value[start : start + size].to(device(), non_blocking=True) for name, value in batch.items()}
