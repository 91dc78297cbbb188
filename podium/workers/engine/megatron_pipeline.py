"""Forward and backward of micro-batches through the stages of a Megatron model, by megatron-core's schedules."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from podium.utils.device import device
from podium.utils.out_of_memory import micro_batch_of
from podium.utils.torch_functional import Denominator
from podium.workers.engine.base import LossFn, Tensors, accumulate
from podium.workers.engine.megatron_batch import MicroBatch, output_names, outputs_of
from podium.workers.engine.spec import Outputs


def sum_gradients(chunks: Sequence[Any]) -> None:
    """Makes gradients sums over micro-batches and ranks. Call it before the chunks are wrapped.

    Losses here are shares of the mini-batch: nothing is left to divide by, neither the number of micro-batches, which
    megatron-core would take for the loss of each, nor the number of ranks.
    """
    config = get_model_config(chunks[0])
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = _finalize


def _finalize(model: list[Any], _num_tokens: Any, **groups: Any) -> None:
    finalize_model_grads(model, None, **groups)


class Pipeline:
    """Runs micro-batches through the chunks of this rank and, on every rank alike, gives what comes out at the end.

    Args:
        chunks: this rank's, wrapped for training or not.
        kind: of the outputs.
    """

    def __init__(self, chunks: Sequence[Any], kind: Outputs):
        self._chunks, self._kind = list(chunks), kind
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._last = parallel_state.get_pipeline_model_parallel_last_rank()

    @property
    def is_last(self) -> bool:
        """This rank has the model's outputs."""
        return torch.distributed.get_rank() == self._last

    @torch.no_grad()
    def infer(self, micros: list[MicroBatch]) -> Tensors:
        """The outputs of all rows, (B, R) each."""

        def finish(micro: MicroBatch, output: torch.Tensor, non_loss_data: bool) -> Tensors:
            return outputs_of(micro, output, self._kind) if micro.counts else {}

        for chunk in self._chunks:
            chunk.eval()
        parts = [part for part in self._run(micros, finish, forward_only=True, collect_non_loss_data=True) if part]
        shapes = [micro.rows["responses"].shape for micro in micros if micro.counts]
        whole = torch.Size([sum(shape[0] for shape in shapes), shapes[0][1]])
        outputs = {}
        for name in output_names(self._kind):
            if self.is_last:
                outputs[name] = torch.cat([part[name] for part in parts])
            else:
                outputs[name] = torch.empty(whole, dtype=torch.float32, device=device())
            if self._group.size() > 1:
                torch.distributed.broadcast(outputs[name], src=self._last, group=self._group)
        return outputs

    def train(self, micros: list[MicroBatch], loss_fn: LossFn, denominator: Denominator) -> Tensors:
        """Adds up gradients; returns the metrics of this shard and ``loss``, on the last stage, elsewhere nothing."""
        metrics: Tensors = {}

        def finish(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            if micro.counts:
                loss, part = loss_fn(outputs_of(micro, output, self._kind), micro.rows, denominator)
                accumulate(metrics, {**part, LOSS: loss})
            else:
                loss = output.float().sum() * 0.0
            return loss, torch.zeros((), dtype=torch.int, device=device()), None

        for chunk in self._chunks:
            chunk.train()
        self._run(micros, finish, forward_only=False)
        return metrics

    def share(self, value: Any) -> Any:
        """What the last stage has, a plain object, on every stage."""
        box = [value]
        if self._group.size() > 1:
            torch.distributed.broadcast_object_list(box, src=self._last, group=self._group, device=device())
        return box[0]

    def _run(self, micros: list[MicroBatch], finish: Any, **options: Any) -> list[Any]:
        def step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)
            output = chunk(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
            return output, partial(finish, micro)

        rows, tokens = micros[0].input_ids.shape
        with micro_batch_of(partial(_largest, micros)):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(micros) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(micros),
                seq_length=tokens,
                micro_batch_size=rows,
                **options,
            )


def _largest(micros: Sequence[MicroBatch]) -> tuple[int, int, int]:
    """Rows, tokens, and the width of a row with padding, as they came, of the one with the most tokens."""
    masks = max((micro.rows["attention_mask"] for micro in micros), key=lambda mask: int(mask.sum()))
    return len(masks), int(masks.sum()), masks.shape[1]


LOSS = "@loss"
"""Among the metrics: the loss itself."""
