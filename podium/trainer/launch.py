"""Starting the worker groups of a run."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from podium.protocol import ClassWithInitArgs, ResourcePool, WorkerGroup, create_colocated_worker_cls, make_backend
from podium.trainer.deadlines import call_deadlines, longest
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
    trainer: Any,
    device: str,
    roles: dict[str, ClassWithInitArgs],
    name: str,
    rollout: Any = None,
    stacks: Path | None = None,
    reward_model: Any = None,
) -> Iterator[dict[str, WorkerGroup]]:
    """Starts every role on every rank, colocated in one process a rank, and ends them all on the way out.

    Args:
        trainer: has ``backend``, ``nnodes``, ``n_gpus_per_node``, ``rpc_timeout_s``, ``deadlines``.
        roles: in the order in which each process constructs them.
        rollout: has ``placement``, ``nnodes``, ``n_gpus_per_node``; takes the role ``rollout`` out of these processes
            unless its placement is ``process``. None: all roles are together.
        stacks: folder where `podium.trainer.blame` finds the stacks of ranks that are late.
        reward_model: has ``nnodes``, ``n_gpus_per_node``; takes the role ``reward_model`` to devices of its own.
    """
    own = rollout.placement if rollout is not None else "process"
    apart = {"rollout": rollout} if own == "apart" else {}
    apart |= {"reward_model": reward_model} if reward_model is not None else {}
    here = trainer.n_gpus_per_node
    if trainer.backend == "local":
        here += sum(section.n_gpus_per_node for section in apart.values())
    deadlines = call_deadlines(trainer, rollout)
    env = {
        "PODIUM_DEVICE": device,
        "PODIUM_TIMEOUT_S": str(longest(trainer, deadlines)),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # one line about NUMA binding from each rank
        "TRANSFORMERS_VERBOSITY": "error",
        **_threads(here),
    }
    if stacks is not None:
        shutil.rmtree(stacks, ignore_errors=True)  # of processes that are gone
        env["PODIUM_STACKS"] = str(stacks)
    use_gpu = device == "cuda"
    pool = ResourcePool(
        [trainer.n_gpus_per_node] * trainer.nnodes,
        name=name,
        use_gpu=use_gpu,
        max_colocate_count=2 if own == "device" else 1,
    )
    alone = {*apart, *(["rollout"] if own == "device" else [])}
    starts = [(name, pool, {role: spec for role, spec in roles.items() if role not in alone}, env)]
    if own == "device":
        starts.append(("rollout", pool, {"rollout": roles["rollout"]}, env))
    used = trainer.n_gpus_per_node
    for role, section in apart.items():
        others = ResourcePool([section.n_gpus_per_node] * section.nnodes, name=role, use_gpu=use_gpu)
        # Ray hides the devices of other pools by itself.
        hidden = _next_devices(used, section.n_gpus_per_node, role) if trainer.backend == "local" and use_gpu else {}
        used += section.n_gpus_per_node
        starts.append((role, others, {role: roles[role]}, env | hidden))
    groups: dict[str, WorkerGroup] = {}
    try:
        with make_backend(trainer.backend, **_backend_options(trainer.backend, len(starts))) as backend:
            for label, ranks, specs, variables in starts:
                print(
                    f"start {ranks.world_size} rank(s) on the {trainer.backend} backend: {', '.join(specs)}", flush=True
                )
                group = backend.start_group(
                    ranks,
                    create_colocated_worker_cls(specs),
                    env=variables,
                    name=label,
                    timeout_s=trainer.rpc_timeout_s,
                    deadlines=deadlines,
                )
                groups |= group.spawn(list(specs))
            yield groups
    finally:
        remove_stale()  # weights in shared memory, of workers that were killed


def _next_devices(used: int, wanted: int, role: str) -> dict[str, str]:
    """Devices for a role of its own: those after the first `used`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if len(names) < used + wanted:
        raise UserError(
            f"the role {role} has {wanted} GPU(s) of its own beside the {used} of the others, but there are "
            f"{len(names)}: give it fewer, or have it share the trainer's"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[used : used + wanted])}


def _backend_options(backend: str, groups: int) -> dict[str, Any]:
    """Groups that call each other cannot run in the driver's process."""
    return {"in_process": groups == 1} if backend == "local" else {}


def _threads(ranks_per_node: int) -> dict[str, str]:
    """Cores shared out among a node's ranks, one left for the driver; more OpenMP threads than cores crawl."""
    if "OMP_NUM_THREADS" in os.environ:
        return {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, (cores - 1) // ranks_per_node))}
