"""The most memory that this process had during each kind of call."""

import functools
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from podium.utils.device import is_cuda, memory_used


class MemoryLedger:
    """Peaks by role and method, in GB: ``peak_rss_gb`` of host memory, and on CUDA ``peak_device_gb``.

    Where the kernel does not reset its peak (``/proc/self/clear_refs``), host memory at the end of a call stands in.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)

    @contextmanager
    def __call__(self, role: str, method: str) -> Iterator[None]:
        """Takes note of what happens inside; calls do not nest."""
        is_reset = _reset()
        try:
            yield
        finally:
            peaks = self._peaks[role].setdefault(method, {})
            for name, value in _peak(is_reset).items():
                peaks[name] = max(value, peaks.get(name, 0.0))

    def pop(self, role: str) -> dict[str, float]:
        """``METHOD/peak_rss_gb``, ... of a role since the last `pop`."""
        peaks = self._peaks.pop(role, {})
        return {f"{method}/{name}": value for method, values in peaks.items() for name, value in values.items()}


LEDGER = MemoryLedger()
"""Of this process."""


@functools.cache
def _files(pid: int) -> tuple[int, int] | None:
    """Descriptors of this process's clear_refs and status, kept open: to open them costs an empty call a fifth more."""
    try:
        return os.open(f"/proc/{pid}/clear_refs", os.O_WRONLY), os.open(f"/proc/{pid}/status", os.O_RDONLY)
    except OSError:
        return None


def _reset() -> bool:
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()
    files = _files(os.getpid())
    try:
        return files is not None and os.write(files[0], b"5") > 0
    except OSError:
        return False


def _peak(was_reset: bool) -> dict[str, float]:
    peaks = {"peak_rss_gb": _high_water() if was_reset else memory_used()["rss_gb"]}
    if is_cuda():
        peaks["peak_device_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return peaks


def _high_water() -> float:
    files = _files(os.getpid())
    assert files is not None, "only after a reset"
    _, _, rest = os.pread(files[1], 1 << 14, 0).partition(b"VmHWM:")
    return int(rest.split(maxsplit=1)[0]) * 1024 / 1e9
