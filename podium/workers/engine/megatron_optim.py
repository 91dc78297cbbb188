"""AdamW over a Megatron model, as `podium.workers.engine.optim` builds it over an FSDP one."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config

from podium.workers.engine.optim import lr_factor
from podium.workers.engine.spec import Training


def with_gradient_buffers(chunks: Sequence[Any]) -> list[Any]:
    """Chunks whose parameters and float32 gradients lie in flat buffers, reduced over data-parallel ranks."""
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [
        # Later chunks start their reduction when the first is done: smaller buckets would not hide it.
        DistributedDataParallel(get_model_config(chunk), options, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class MegatronAdam:
    """megatron-core's distributed optimizer: float32 master weights and state, split over data-parallel ranks.

    Args:
        chunks: from `with_gradient_buffers`.
        dtype: of the model's parameters.
    """

    def __init__(self, chunks: Sequence[Any], training: Training, dtype: torch.dtype):
        config = training.optim
        self._chunks, self._lr = chunks, config.lr
        self._factor = lr_factor(config, training.total_steps)
        self.steps = 0
        """Optimizer steps made."""
        options = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=training.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        # Its checkpoints do not go through gloo groups of their own, so none are made.
        self.inner = get_megatron_optimizer(options, list(chunks), use_gloo_process_groups=False)
        """megatron-core's own."""
        self.apply_schedule()

    def apply_schedule(self) -> float:
        """Gives every group the learning rate of the next step, which is returned, and its weight decay.

        megatron-core marks norms and biases as exempt from weight decay, and leaves it to its scheduler to act on that.
        """
        lr = self._lr * self._factor(self.steps)
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.inner.config.weight_decay * group["wd_mult"]
        return lr

    def tensors(self) -> list[torch.Tensor]:
        """State, and master weights that are not the parameters themselves, as float32 ones are."""
        parameters = {parameter.untyped_storage().data_ptr() for c in self._chunks for parameter in c.parameters()}
        parts = [part.optimizer for part in self.inner.chained_optimizers]
        masters = [master for part in parts for group in part.param_groups for master in group["params"]]
        state = [value for part in parts for each in part.state.values() for value in each.values()]
        return [
            tensor
            for tensor in [*masters, *state]
            if tensor.dim() and tensor.untyped_storage().data_ptr() not in parameters
        ]

    def zero_grad(self) -> None:
        """Clears all gradients, also of a step that failed half-way."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def gradient_norm(self) -> float:
        """Of the whole model's gradient, which is complete once backward has returned; alike on every rank."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    def step(self) -> float:
        """Clips and steps; returns the learning rate it used."""
        lr = self.apply_schedule()
        self.inner.step()
        self.steps += 1
        return lr
