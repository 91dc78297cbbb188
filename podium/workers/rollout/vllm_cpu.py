"""What vLLM's CPU build needs to be a rollout whose weights are written in place."""

import functools
import secrets
from pathlib import Path
from typing import Any

import torch

from podium.utils.freed_memory import FreedMemory


@functools.cache
def adapt_cpu_build() -> None:
    """Changes vLLM in this process, before its first engine is built."""
    import vllm.platforms

    # torch.compile of a three-line function costs 12 to 21 s at the first request with log-probs.
    type(vllm.platforms.current_platform).simple_compile_backend = "eager"
    import vllm.model_executor.layers.utils as layers

    # The CPU build repacks each linear weight and drops the original. Keeping it lets a sync write in place, lets the
    # sync be verified against what generation really multiplies by, and keeps a tied head tied.
    layers.dispatch_cpu_unquantized_gemm = _plain_cpu_linear
    _keep_natural_experts()
    _name_shared_memory_apart()
    _free_memory_in_sleep()


def _plain_cpu_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _keep_natural_experts() -> None:
    """Keeps experts as they are loaded beside the copy that is repacked for the kernel, which takes no others."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    pad = CPUUnquantizedExperts._pad_moe_intermediate  # the last step before they are repacked

    def pad_and_keep(self: Any, layer: Any) -> None:
        pad(self, layer)
        layer.podium_natural = (layer.w13_weight.data, layer.w2_weight.data)

    CPUUnquantizedExperts._pad_moe_intermediate = pad_and_keep


def natural_experts(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``w13`` (experts, 2 x width, hidden) and ``w2`` (experts, hidden, width) of a layer, as they are loaded."""
    kept: tuple[torch.Tensor, torch.Tensor] | None = getattr(layer, "podium_natural", None)
    return kept if kept is not None else (layer.w13_weight.data, layer.w2_weight.data)


def repack_experts(model: torch.nn.Module) -> None:
    """Brings the kernel's copies up to date with the experts as loaded, where there are two."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "podium_natural")]
    for layer in layers:
        isa = layer.quant_method.moe_kernel.fused_experts.isa
        for packed, natural in zip((layer.w13_weight, layer.w2_weight), layer.podium_natural, strict=True):
            torch.ops._C.prepack_moe_weight(natural, packed.data, isa)


def _free_memory_in_sleep() -> None:
    """Gives the CPU worker what the CUDA one has: the CPU build's own `sleep` and `wake_up` do nothing."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self: Any, level: int = 1) -> None:
        self.podium_freed = {"kv_cache": FreedMemory(self.model_runner.kv_caches)}
        if level == 2:
            self.podium_freed["weights"] = FreedMemory(weight_tensors(self.get_model()))

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        for tag in tags if tags is not None else list(self.podium_freed):
            if tag in self.podium_freed:
                self.podium_freed.pop(tag).restore()

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def weight_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, and the experts that are kept beside the kernel's copies."""
    kept = [getattr(module, "podium_natural", ()) for module in model.modules()]
    return [*(parameter.data for parameter in model.parameters()), *(tensor for pair in kept for tensor in pair)]


def resident_bytes(worker: Any) -> int:
    """Of a CPU worker's weights and key-value cache."""
    tensors = [*worker.model_runner.kv_caches, *weight_tensors(worker.get_model())]
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _name_shared_memory_apart() -> None:
    """Lets tensor-parallel groups share memory under names drawn anew, and only until all ranks have it.

    vLLM's own names are the same in every run and stay when processes are killed; the next run then fails.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def name(communicator: Any) -> str:
        if not hasattr(communicator, "podium_name"):
            drawn = [f"podium-{secrets.token_hex(8)}-cpushm"]
            torch.distributed.broadcast_object_list(drawn, communicator.ranks[0], group=communicator.device_group)
            communicator.podium_name = drawn[0]
        chosen: str = communicator.podium_name
        return chosen

    start = _CPUSHMDistributed._init_cpu_shm

    def start_and_unlink(self: Any) -> int:
        handle: int = start(self)
        if self.communicator.rank == self.communicator.ranks[0]:
            for path in Path("/dev/shm").glob(f"{self.group_name}*"):
                path.unlink()
        return handle

    _CPUSHMDistributed.make_group_name = staticmethod(name)
    _CPUSHMDistributed._init_cpu_shm = start_and_unlink
