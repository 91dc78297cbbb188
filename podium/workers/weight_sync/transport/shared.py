"""Memory that two processes on one device see, and who may write to it when."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from podium.utils.device import is_cuda
from podium.workers.weight_sync.transport.base import make_buffer

_SHM = Path("/dev/shm")


def share(nbytes: int) -> tuple[torch.Tensor, Any]:
    """A buffer, and what `attach` needs in another process to see it: CUDA IPC on CUDA, POSIX shared memory on a CPU.

    Raises:
        OSError: no room.
    """
    if is_cuda():
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = make_buffer(nbytes)
        return buffer, reduce_tensor(buffer)
    path = _SHM / f"podium-{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Without it the first write to a page that does not fit any more would be a SIGBUS.
        os.posix_fallocate(file, 0, nbytes)
        return _map(path, nbytes), (path, nbytes)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(file)


def attach(handle: Any) -> torch.Tensor:
    """The buffer that another process shares."""
    if is_cuda():
        rebuild, arguments = handle
        return rebuild(*arguments)
    path, nbytes = handle
    buffer = _map(path, nbytes)
    path.unlink()  # both have it now: no name is left behind, whichever of them is killed
    return buffer


def _map(path: Path, nbytes: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
