"""Starting the worker groups of a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from podium.protocol import ClassWithInitArgs, ResourcePool, WorkerGroup, create_colocated_worker_cls, make_backend
from podium.utils.errors import UserError
from podium.workers.weight_sync.snapshot import remove_stale


def resolve_device(requested: str) -> str:
    """``cpu`` or ``cuda`` for `trainer.device`.

    Raises:
        UserError: cuda is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise UserError("trainer.device=cuda: torch sees no CUDA device here; use auto or cpu")
    return "cuda" if available and requested != "cpu" else "cpu"


@contextmanager
def worker_groups(
    trainer: Any, device: str, roles: dict[str, ClassWithInitArgs], name: str
) -> Iterator[dict[str, WorkerGroup]]:
    """Starts every role on every rank, colocated in one process a rank, and ends them all on the way out.

    Args:
        trainer: has ``backend``, ``nnodes``, ``n_gpus_per_node``, ``rpc_timeout_s``.
        roles: in the order in which each process constructs them.
    """
    env = {
        "PODIUM_DEVICE": device,
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # one line about NUMA binding from each rank
        "TRANSFORMERS_VERBOSITY": "error",
        **_threads(trainer.n_gpus_per_node),
    }
    pool = ResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=device == "cuda", name=name)
    print(f"start {pool.world_size} rank(s) on the {trainer.backend} backend", flush=True)
    try:
        with make_backend(trainer.backend) as backend:
            group = backend.start_group(
                pool, create_colocated_worker_cls(roles), env=env, name=name, timeout_s=trainer.rpc_timeout_s
            )
            yield group.spawn(list(roles))
    finally:
        remove_stale()  # weights in shared memory, of workers that were killed


def _threads(ranks_per_node: int) -> dict[str, str]:
    """Cores shared out among a node's ranks, one left for the driver; more OpenMP threads than cores crawl."""
    if "OMP_NUM_THREADS" in os.environ:
        return {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, (cores - 1) // ranks_per_node))}
