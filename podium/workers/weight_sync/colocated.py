"""Weight sync where actor and rollout share a process: tensors are handed over by reference, one at a time."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from podium.workers.engine.base import TrainEngine
from podium.workers.rollout.base import RolloutEngine
from podium.workers.weight_sync.checksum import tensor_checksum

# "sample" checks every 8th tensor, another eighth at each version.
_SAMPLE_STRIDE = 8


class WeightSyncError(RuntimeError):
    """The rollout does not hold what the actor sent; it refuses to generate until a sync succeeds."""


@dataclass(frozen=True)
class SyncReport:
    """The ledger line of one sync on one rank."""

    version: int
    transport: str
    tensors: int
    bytes: int
    seconds: float
    """Export, hand-over and drop of caches, without verification."""
    verified_tensors: int
    verify_seconds: float


def sync_colocated(
    trainer: TrainEngine, rollout: RolloutEngine, version: int, dtype: torch.dtype, verify: str
) -> SyncReport:
    """Moves the trainer's weights into the rollout of the same process, as `version`.

    Every rank of the trainer calls it together: gathering a parameter is a collective. At most one whole parameter
    exists beside the two models.

    Args:
        dtype: precision of the rollout; the cast happens before the gather.
        verify: ``off``, ``sample`` or ``full``: bit-compare checksums of what was sent with what generation uses.

    Raises:
        WeightSyncError: names the tensors that differ, or that the rollout did not take.
    """
    shapes: dict[str, torch.Size] = {}
    checksums: dict[str, int] = {}
    size = 0
    verify_seconds = 0.0

    def outgoing() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal size, verify_seconds
        for index, (name, tensor) in enumerate(trainer.export(dtype)):
            shapes[name] = tensor.shape
            size += tensor.nbytes
            if verify == "full" or (verify == "sample" and (index + version) % _SAMPLE_STRIDE == 0):
                began = time.perf_counter()
                checksums[name] = tensor_checksum(tensor)
                verify_seconds += time.perf_counter() - began
            yield name, tensor

    start = time.perf_counter()
    rollout.update_weights(version, outgoing())
    seconds = time.perf_counter() - start - verify_seconds
    start = time.perf_counter()
    if verify != "off":
        _compare(rollout, shapes, checksums, version)
    verify_seconds += time.perf_counter() - start
    return SyncReport(version, "colocated", len(shapes), size, seconds, len(checksums), verify_seconds)


def _compare(rollout: RolloutEngine, shapes: dict[str, torch.Size], checksums: dict[str, int], version: int) -> None:
    held = {name: tensor for name, tensor in rollout.read_weights(shapes) if name in shapes}
    lost = sorted(set(shapes) - set(held))
    wrong = [name for name, value in checksums.items() if name in held and tensor_checksum(held[name]) != value]
    if lost or wrong:
        rollout.weight_version = -1
        problems = [f"not taken: {', '.join(lost[:5])}"] * bool(lost) + [f"differ: {', '.join(wrong[:5])}"] * bool(
            wrong
        )
        raise WeightSyncError(
            f"weight sync {version}: {len(lost) + len(wrong)} of {len(shapes)} tensors ({'; '.join(problems)})"
        )
