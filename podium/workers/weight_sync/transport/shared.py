"""Memory that several processes on one device see."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from podium.utils.device import is_cuda
from podium.workers.weight_sync.transport.base import make_buffer

_SHM = Path("/dev/shm")


class SharedBuffer:
    """Bytes in CUDA memory, shared by an IPC handle, or in POSIX shared memory on a CPU.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, nbytes: int):
        self._path: Path | None = None
        if is_cuda():
            from torch.multiprocessing.reductions import reduce_tensor

            self.memory = make_buffer(nbytes)
            self.handle: Any = reduce_tensor(self.memory)
            return
        path = _SHM / f"podium-{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._path = path
        try:
            os.posix_fallocate(file, 0, nbytes)  # without it, the first write that finds no room would be a SIGBUS
            self.memory, self.handle = _map(path, nbytes), (path, nbytes)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Takes away the name once all who need it are attached: nothing is left behind, whoever is killed."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


def attach(handle: Any) -> torch.Tensor:
    """The memory of another process's `SharedBuffer`."""
    if is_cuda():
        rebuild, arguments = handle
        shared: torch.Tensor = rebuild(*arguments)
        return shared
    return _map(*handle)


def _map(path: Path, nbytes: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def settle() -> None:
    """Waits for what this rank has started on its GPU: another process is told that the memory is ready."""
    if is_cuda():
        torch.cuda.current_stream().synchronize()
