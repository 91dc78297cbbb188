"""The Megatron engine: tensor, pipeline, context and expert parallel beside data parallel, on CUDA or CPU."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from transformers import GenerationConfig

from podium.models.hf import causal_lm_architecture, load_hf_config, model_directory, write_hf
from podium.models.megatron.model import build_chunks
from podium.models.megatron.name_map import pieces
from podium.models.megatron.parallel import MegatronLayout
from podium.models.megatron.weights import Checkpoint, export, load
from podium.models.value_head import value_architecture, value_config
from podium.utils.device import device
from podium.utils.errors import UserError
from podium.utils.memory_buffer import FlatStage
from podium.utils.piece import Piece
from podium.utils.random_state import state_tensor, state_text
from podium.utils.torch_functional import Denominator
from podium.workers.engine import megatron_checkpoint as checkpoint
from podium.workers.engine.base import (
    EmptyBatchError,
    LossFn,
    NonFiniteError,
    Placement,
    Tensors,
    TrainEngine,
    reduce_metrics,
)
from podium.workers.engine.megatron_batch import MicroBatch, micro_batches
from podium.workers.engine.megatron_optim import MegatronAdam, with_gradient_buffers
from podium.workers.engine.megatron_pipeline import LOSS, Pipeline, sum_gradients
from podium.workers.engine.megatron_stage import flat_stage
from podium.workers.engine.offload import Part, needs
from podium.workers.engine.spec import LogProbs, ModelSpec, Outputs, Scores, Training


class MegatronEngine(TrainEngine):
    """A Hugging Face model laid out by megatron-core.

    Args:
        model: what to load. Every rank reads its own slices.
        config: has the fields of `MegatronConfig`.
        training: None for a model that is never trained.

    Raises:
        UserError: the model or its layout is not supported.
    """

    def __init__(self, model: ModelSpec, config: Any, training: Training | None = None):
        super().__init__()
        self._writers: Any = None
        self._model, self._layout = model, MegatronLayout.from_config(config)
        self._dtype, self._pack = getattr(torch, config.dtype), config.use_remove_padding
        self._directory = model_directory(model.path)
        self._hf_config = load_hf_config(self._directory, "model.path", model.trust_remote_code).get_text_config()
        self._modules = build_chunks(
            self._hf_config,
            self._layout,
            dtype=self._dtype,
            value_head=not isinstance(model.outputs, LogProbs),
            recompute=model.recompute,
        )
        load(self._modules, self._directory)
        self._start_head(model.outputs)
        chunks: list[Any] = list(self._modules)
        self._optimizer = None
        if training is None:
            for module in self._modules:
                module.requires_grad_(False)
        else:
            sum_gradients(chunks)
            chunks = with_gradient_buffers(chunks)
            self._optimizer = MegatronAdam(chunks, training, self._dtype)
        self._wrapped = chunks
        self._pipeline = Pipeline(chunks, model.outputs)
        self.rest(config)

    def memory(self, part: Part) -> list[torch.Tensor]:
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        if part == "params":
            return parameters
        if self._optimizer is None:
            return []
        return self._optimizer.tensors() if part == "optimizer" else [each.main_grad for each in parameters]

    def _start_head(self, kind: Outputs) -> None:
        """`load` takes a score head wherever the directory has one; a new value model starts from zero.

        Raises:
            UserError: a reward model without a head.
        """
        if isinstance(kind, LogProbs):
            return
        if isinstance(kind, Scores) and kind.has_head:
            if "score.weight" not in Checkpoint(self._directory):
                raise UserError(f"{self._model.path}: there is no score.weight; give a trained reward model")
            return
        for piece in self.pieces():
            if piece.name == "score.weight":
                piece.tensor.zero_()

    @property
    def placement(self) -> Placement:
        # All ranks of a shard have its results; those of the last stage had them first.
        first = parallel_state.get_tensor_model_parallel_rank() == 0 == parallel_state.get_context_parallel_rank()
        return Placement(parallel_state.get_data_parallel_rank(), answers=first and self._pipeline.is_last)

    @needs("params")
    def infer(self, batch: Tensors, micro_batch_size: int) -> Tensors:
        outputs = self._pipeline.infer(self._micro_batches(batch, micro_batch_size))
        valid = batch["response_mask"].bool().to(device())
        return {name: torch.where(valid, value, 0.0).cpu() for name, value in outputs.items()}

    @needs("params", "optimizer", "grads")
    def train(self, batch: Tensors, loss_fn: LossFn, micro_batch_size: int) -> dict[str, float]:
        assert self._optimizer is not None
        self._optimizer.zero_grad()  # a call that failed half-way leaves the gradients of its first micro-batches
        group = parallel_state.get_data_parallel_group()
        denominator = _count(batch["response_mask"], group)
        if denominator.tokens == 0:
            raise EmptyBatchError("no valid token in the mini-batch: no update was made")
        metrics = self._pipeline.train(self._micro_batches(batch, micro_batch_size), loss_fn, denominator)
        reduced = self._pipeline.share(reduce_metrics(metrics, group) if self._pipeline.is_last else None)
        total, grad_norm = reduced.pop(LOSS), self._optimizer.gradient_norm()
        if not _everywhere(math.isfinite(grad_norm) and math.isfinite(total)):
            self._optimizer.zero_grad()
            raise NonFiniteError(f"loss is {total} and gradient norm is {grad_norm}: no update was made")
        lr = self._optimizer.step()
        self._optimizer.zero_grad()
        return {**reduced, "grad_norm": grad_norm, "lr": lr}

    def _micro_batches(self, batch: Tensors, size: int) -> list[MicroBatch]:
        return micro_batches(batch, size, self._model.outputs, self._layout, self._pack)

    @needs("params")
    def pieces(self) -> list[Piece]:
        """What this rank holds of the whole tensors."""
        return pieces(self._modules)

    @needs("params")
    def flat_stage(self) -> FlatStage | None:
        return flat_stage(self._modules, self._wrapped) if self._optimizer is not None else None

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        with self.phase("params"):
            yield from export(self._modules, dtype)

    @needs("params", "optimizer")
    def save(self, path: str) -> None:
        checkpoint.snapshot(self._modules, self._optimizer, copy=False)(path, None)

    @needs("params", "optimizer")
    def snapshot(self) -> Callable[[str], None]:
        if self._writers is None:  # background writing meets in a group of its own, out of the way of the training's
            self._writers = torch.distributed.new_group(backend="gloo")
        write = checkpoint.snapshot(self._modules, self._optimizer)
        return lambda path: write(path, self._writers)

    def random_state(self) -> dict[str, Any]:
        streams = tensor_parallel.get_cuda_rng_tracker().get_states()
        return {"layout": str(self._layout), "streams": {name: state_text(state) for name, state in streams.items()}}

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        if state["layout"] == str(self._layout):  # those of a rank mean something in its own layout only
            streams = {name: state_tensor(text) for name, text in state["streams"].items()}
            tensor_parallel.get_cuda_rng_tracker().set_states(streams)

    def state_bytes(self) -> int:
        count = sum(parameter.numel() for module in self._modules for parameter in module.parameters())
        state = count * 12 if self._optimizer is not None else 0  # master weights and AdamW's two moments
        return (count * self._dtype.itemsize + state) // parallel_state.get_data_parallel_world_size()

    @needs("params", "optimizer")
    def load(self, path: str) -> None:
        checkpoint.load(path, self._modules, self._optimizer)

    def save_hf(self, path: str) -> None:
        writes = torch.distributed.get_rank() == 0
        whole = {name: tensor.cpu() for name, tensor in self.export(self._dtype) if writes}
        try:
            if writes:
                self._write_hf(path, whole)
        finally:  # also where writing fails: the other ranks wait here
            torch.distributed.barrier()

    def _write_hf(self, path: str, whole: Tensors) -> None:
        kind = self._model.outputs
        if not isinstance(kind, LogProbs):
            config = value_config(self._hf_config)
            if isinstance(kind, Scores) and kind.pad_token_id is not None:
                config.pad_token_id = kind.pad_token_id
            write_hf(path, whole, config, value_architecture(config))
            return
        if (Path(self._directory) / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(self._directory)
        else:
            generation = GenerationConfig.from_model_config(self._hf_config)
        write_hf(path, whole, self._hf_config, causal_lm_architecture(self._hf_config), generation)


def _count(response_mask: torch.Tensor, group: Any) -> Denominator:
    """Valid tokens and sequences of the mini-batch over all data-parallel ranks."""
    local = Denominator.from_mask(response_mask)
    counts = torch.tensor([local.tokens, local.sequences], dtype=torch.float64, device=device())
    torch.distributed.all_reduce(counts, group=group)
    return Denominator(*counts.tolist())


def _everywhere(condition: bool) -> bool:
    """Whether it holds on every rank."""
    flag = torch.tensor(int(condition), device=device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag)
