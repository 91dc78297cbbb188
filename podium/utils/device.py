"""The only place that knows whether there is CUDA."""

import contextlib
import functools
import os
import random
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import psutil
import torch

from podium.utils.ports import is_loopback, take_listener

_COPIED = 32 << 20  # bytes: more than the caches of a core hold

# vLLM's CPU build replaces torch.set_num_threads by a stub in the process that it shares with the trainer.
_set_num_threads = torch.set_num_threads


def is_cuda() -> bool:
    """Whether this process computes on CUDA. ``PODIUM_DEVICE=cpu`` keeps it on the CPU of a GPU machine."""
    return os.environ.get("PODIUM_DEVICE", "auto") != "cpu" and torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank: ``cuda:LOCAL_RANK`` or ``cpu``."""
    if not is_cuda():
        return torch.device("cpu")
    # Ray hides all devices but the rank's own; a spawned process sees them all.
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def init_distributed() -> None:
    """Joins the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name; does nothing the second time.

    A rank waits for the others at most PODIUM_TIMEOUT_S seconds (600 where that is not set).

    gloo carries CPU tensors, nccl CUDA tensors. A world of one needs no network, and one on the loopback address
    listens nowhere else.
    """
    if torch.distributed.is_initialized():
        return
    if "OMP_NUM_THREADS" in os.environ:  # torch read it when it was imported, which may have been before it was set
        _set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    backend = "cpu:gloo,cuda:nccl" if is_cuda() else "gloo"
    timeout = timedelta(seconds=float(os.environ.get("PODIUM_TIMEOUT_S", "600")))
    if is_cuda():
        torch.cuda.set_device(device())
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        store: torch.distributed.Store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        if is_loopback(os.environ["MASTER_ADDR"]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = tcp_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank == 0, timeout, world_size)
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def tcp_store(
    host: str, port: int, is_master: bool, timeout: timedelta, world_size: int | None = None
) -> torch.distributed.Store:
    """The store that processes meet in; with `world_size`, it waits until all are there.

    The master listens on the socket that holds the port here, if one does. On a loopback address it listens there
    alone: torch's own would listen on every interface, so it is given a socket.
    """
    listener = take_listener(port) if is_master else None
    if is_master and listener is None and is_loopback(host):
        listener = socket.create_server((host, port), backlog=max(128, world_size or 0)).detach()
    return torch.distributed.TCPStore(
        host,
        port,
        world_size,
        is_master,
        timeout,
        wait_for_workers=world_size is not None,
        master_listen_fd=listener,
    )


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second at which this rank copies memory on its device: the best of a few copies, taken once."""
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device())
    target, seconds = torch.empty_like(source), []
    for _ in range(4):  # the first touches the target's pages
        began = time.perf_counter()
        target.copy_(source)
        if is_cuda():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return _COPIED / min(seconds)


def memory_used() -> dict[str, float]:
    """``rss_gb``, resident host memory of this process, and on CUDA ``device_gb``, what its tensors take there."""
    used = {"rss_gb": psutil.Process().memory_info().rss / 1e9}
    if is_cuda():
        used["device_gb"] = torch.cuda.memory_allocated() / 1e9
    return used


@contextlib.contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Keeps a library that shares this process from moving our global random states and thread count."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if is_cuda() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        if torch.get_num_threads() != threads:
            _set_num_threads(threads)
