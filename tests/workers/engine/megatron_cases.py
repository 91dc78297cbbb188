"""Layouts by short names, groups of ranks that take one after another, and what is compared."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from podium.protocol import Backend, ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup
from podium.trainer.config.shared import MegatronConfig
from tests.workers.conftest import ENV
from tests.workers.engine.plain import Batch

LAYERS = 4
Start = Callable[[int], WorkerGroup]

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
_FLAGS: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "packed": {"use_remove_padding": True},
    "uneven": {"pipeline_stage_layers": [1, 3]},
    "bf16": {"dtype": "bfloat16"},
    "offload": {"param_offload": True, "optimizer_offload": True, "grad_offload": True},
}


def layout(text: str) -> tuple[int, MegatronConfig]:
    """``"tp2 pp2 dp1 sp packed"`` -> ranks and configuration."""
    ranks, fields = 1, {}
    for part in text.split():
        if part in _FLAGS:
            fields.update(_FLAGS[part])
            continue
        name, size = part.rstrip("0123456789"), int(part.lstrip("abcdefghijklmnopqrstuvwxyz"))
        ranks *= size if name in ("tp", "pp", "cp", "dp") else 1
        if name in _SIZES:
            fields[_SIZES[name]] = size
    return ranks, MegatronConfig(**fields)


@contextmanager
def hosts(local_backend: Backend) -> Iterator[Start]:
    """Hosts on so many ranks, started once each."""
    from tests.workers.engine.megatron_hosts import MegatronHost

    groups: dict[int, WorkerGroup] = {}

    def group(ranks: int) -> WorkerGroup:
        if ranks not in groups:
            groups[ranks] = local_backend.start_group(
                ResourcePool([ranks]), ClassWithInitArgs(MegatronHost), env=ENV, timeout_s=120
            )
        return groups[ranks]

    yield group
    for started in groups.values():
        started.shutdown()


def build(start: Start, text: str, path: str, **options: Any) -> WorkerGroup:
    """A group that has an engine for `path` in the layout `text`."""
    ranks, config = layout(text)
    group = start(ranks)
    group.build(path, config, **options)
    group._meshes.clear()  # the group remembers where ranks stand, and this layout is another
    return group


def proto(batch: Batch) -> DataProto:
    return DataProto.from_dict(dict(batch))


def close(left: Batch, right: Batch, atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def close_weights(left: Batch, right: Batch) -> None:
    """Within 1e-5 of a tensor's largest number, and within 2e-6, whichever is less."""
    assert left.keys() == right.keys()
    for name in left:
        atol = min(2e-6, 1e-5 * float(right[name].abs().max()))
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)
