"""The one place that lets megatron-core run where there is no CUDA, and no TransformerEngine.

megatron-core writes "the device" as ``torch.cuda.current_device()``, as the literal ``"cuda"`` and, in its optimizers,
as ``"torch.cuda.FloatTensor"``. On the CPU, `install` binds the name ``torch`` in megatron-core's modules to a view of
torch whose accelerator is the CPU. It holds for all threads of the process and no other library sees it, but for
``Tensor.cuda``, which could only raise here. Where there is CUDA, only what fails without TransformerEngine is mended.
"""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from podium.models.megatron import require_megatron
from podium.utils.device import is_cuda

TRIED = ("0.16.1",)
"""Versions of megatron-core that the replacements below were tried with."""

# They are imported before the view is bound; what megatron-core imports later would miss it.
_MODULES = (
    "models.gpt.gpt_layer_specs",
    "distributed",
    "optimizer",
    "optimizer_param_scheduler",
    "pipeline_parallel",
    "transformer.moe.token_dispatcher",
    "transformer.moe.shared_experts",
    "dist_checkpointing.serialization",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.fully_parallel",
)


@dataclass(frozen=True)
class Replacement:
    """A name in megatron-core and what stands in for it."""

    module: str
    """Below ``megatron.core``."""
    name: str
    """In the module, with dots for attributes of a class."""
    make: Callable[[Any], Any]
    """The old value -> the new one."""

    def owner(self) -> tuple[Any, str]:
        """The object that has the attribute, and the attribute."""
        owner: Any = importlib.import_module(f"megatron.core.{self.module}")
        *path, attribute = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, attribute

    def apply(self) -> None:
        owner, attribute = self.owner()
        setattr(owner, attribute, self.make(getattr(owner, attribute)))


def install() -> None:
    """Lets megatron-core run in this process; does nothing the second time. Call it before a model is built.

    Raises:
        UserError: megatron-core is not installed.
    """
    if _state["installed"]:
        return
    require_megatron()
    for name in _MODULES:
        importlib.import_module(f"megatron.core.{name}")
    for replacement in EVERYWHERE:
        replacement.apply()
    _mend_missing_transformer_engine()
    if not is_cuda():
        view = _cpu_torch()
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core.") and vars(module).get("torch") is torch:
                vars(module)["torch"] = view
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
        for replacement in ON_CPU:
            replacement.apply()
    _state["installed"] = True


_state = {"installed": False}


class _View(types.ModuleType):
    """A module with some of its names replaced."""

    def __init__(self, real: types.ModuleType, **replaced: Any):
        super().__init__(real.__name__)
        vars(self).update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Stream:
    """The CPU's only stream, and its events: whatever was put on it is done."""

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, *_: Any) -> "_Stream":
        return self


def _cpu_torch() -> _View:
    """torch as megatron-core sees it. A line names the calls that need it."""
    cpu, stream = torch.device("cpu"), _Stream()
    cuda = _View(
        torch.cuda,
        is_available=lambda: False,  # PODIUM_DEVICE=cpu on a machine with a GPU
        # tensor_parallel, p2p_communication, rotary_pos_embedding, param_and_grad_buffer, distrib_optimizer, moe.router
        current_device=lambda: cpu,
        synchronize=lambda *_: None,  # schedules, optimizer
        manual_seed=torch.manual_seed,  # tensor_parallel.random.model_parallel_cuda_manual_seed
        get_rng_state=lambda *_: torch.get_rng_state(),  # tensor_parallel.random, checkpointing of activations
        Stream=lambda *_, **__: stream,  # distributed_data_parallel, moe.shared_experts
        current_stream=lambda *_: stream,  # moe.token_dispatcher, param_and_grad_buffer
        default_stream=lambda *_: stream,
        stream=lambda _: contextlib.nullcontext(),  # moe.token_dispatcher, param_and_grad_buffer
    )
    # Their device is "cuda" in schedules, clip_grads, optimizer, transformer.utils and exchange_utils.
    factories = (torch.zeros, torch.ones, torch.empty, torch.tensor, torch.empty_like)
    return _View(torch, cuda=cuda, **{factory.__name__: _on_cpu(factory) for factory in factories})


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that takes "cuda" for the CPU. Pinned memory is CUDA's."""

    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which asks tensors for their type and expects CUDA's names."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """While open, ``tensor.type()`` of a CPU tensor reads ``torch.cuda.FloatTensor`` and so on."""
    real: Any = torch.Tensor.type

    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return real(self, dtype, *args, **kwargs)
        return real(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _numpy_or_same(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


ON_CPU = (
    # They read and set the random state of a CUDA device.
    Replacement("tensor_parallel.random", "_get_cuda_rng_state", lambda _: _random_state),
    Replacement("tensor_parallel.random", "_set_cuda_rng_state", lambda _: _set_random_state),
    # They sort parameters and gradients by type strings that only CUDA tensors have.
    Replacement("optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__", _with_cuda_type_names),
    Replacement("optimizer.distrib_optimizer", "DistributedOptimizer.__init__", _with_cuda_type_names),
    Replacement("optimizer.optimizer", "clip_grad_by_total_norm_fp32", _with_cuda_type_names),
    # It copies split sizes to the host only from a GPU, and all_to_all_single takes no tensor for them.
    Replacement("transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", lambda _: _numpy_or_same),
)


def _mend_missing_transformer_engine() -> None:
    """What megatron-core gets wrong wherever TransformerEngine is missing, with CUDA or without."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # router_gating_linear asks whether it is None
    if not HAVE_APEX_OR_TE:
        for replacement in WITHOUT_APEX:
            replacement.apply()


def _with_gaps_between_buckets(gather_state: Callable[..., Any]) -> Callable[..., Any]:
    def gather(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = gather_state(self, *args, **kwargs)
        for index, buffer in enumerate(self.buffers if state is not None else ()):
            for tensors in state[index].values():
                for name, flat in tensors.items():
                    if torch.is_tensor(flat):
                        tensors[name] = _spread_over_buckets(flat, buffer)
        return state

    return gather


def _spread_over_buckets(flat: torch.Tensor, buffer: Any) -> torch.Tensor:
    """The buckets of a buffer, laid end to end in `flat`, each at its own offset."""
    whole, start = flat.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return whole


EVERYWHERE = (
    # It leaves out the padding between buckets, and its caller looks parameters up as if it had not: where a tied
    # output layer has a bucket of its own, the others' state would be saved shifted.
    Replacement(
        "optimizer.distrib_optimizer", "DistributedOptimizer.get_parameter_state_dp_zero", _with_gaps_between_buckets
    ),
)


def _set_states_with_step(set_states: Callable[..., None]) -> Callable[..., None]:
    def set_with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        with torch.no_grad():
            set_states(self, model_param, {**tensors, "step": state["step"]})

    return set_with_step


def _states_of_fresh_too(sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    def states(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return sharded_state_dict(self, model_sharded_state_dict, is_loading, **kwargs)

    return states


WITHOUT_APEX = (
    # It looks for torch AdamW's "step" among the tensors of a checkpoint, which has none.
    Replacement(
        "optimizer.distrib_optimizer",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        _set_states_with_step,
    ),
    # It asserts a "step" also in an optimizer that has not made one.
    Replacement("optimizer.distrib_optimizer", "DistributedOptimizer.sharded_state_dict", _states_of_fresh_too),
)
