"""DataProto, Podium against verl: seconds and peak memory by operation, and the cost of an empty RPC.

    python benchmarks/dataproto.py --verl-python VENV/bin/python

A batch of 1024 rows x 2048 tokens x 6 columns (three int64, three float32) and 4 object columns. Each measurement has a
process of its own: CPU time of a call on one thread (wall time for Ray, whose work is in other processes too), the best
of ``--repeats`` rounds, and how far the first call raised the process's peak resident memory. Without --verl-python
only Podium is measured. The last line compares an empty call to 4 workers through a Podium worker group with the same
call by bare Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from beside import measure_apart

OPERATIONS = ["construct", "chunk", "chunk+concat", "repeat", "reorder", "union", "select", "pop"]
OPERATIONS += ["iterate", "pickle", "ray"]
INTEGERS = ("input_ids", "attention_mask", "position_ids")
FLOATS = ("old_log_probs", "advantages", "returns")


def columns(rows: int, width: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Tensor columns (rows, width), int64 or float32 by name."""
    import torch

    random = torch.Generator().manual_seed(0)
    whole = {name: torch.randint(0, 1000, (rows, width), generator=random) for name in names if name in INTEGERS}
    return whole | {name: torch.randn(rows, width, generator=random) for name in names if name not in INTEGERS}


def objects(rows: int) -> dict[str, Any]:
    """Object columns like those of a reward manager's batch."""
    import numpy as np

    values = {
        "uid": [str(row // 8) for row in range(rows)],
        "data_source": ["gsm8k"] * rows,
        "reward_model": [{"style": "rule", "ground_truth": str(row)} for row in range(rows)],
        "extra_info": [{"index": row, "split": "train"} for row in range(rows)],
    }
    return {name: np.array(column, dtype=object) for name, column in values.items()}


def operation(library: str, name: str, rows: int, width: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """What makes a batch, untimed, and the call to be timed on it."""
    import torch

    if library == "verl":
        from verl import DataProto
    else:
        from podium.protocol import DataProto  # type: ignore[assignment]

    def make() -> Any:
        return DataProto.from_dict(columns(rows, width, INTEGERS + FLOATS), objects(rows), {"step": 1})

    tensors, others = columns(rows, width, INTEGERS + FLOATS), objects(rows)
    if name == "construct":
        return lambda: None, lambda _: DataProto.from_dict(tensors, others, {"step": 1})
    batch = make()
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    more = DataProto.from_dict(columns(rows, width, ("values",)))
    if name == "ray":
        import ray

        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return lambda: batch, lambda it: ray.get(ray.put(it))

    def copy() -> Any:  # reorder, union and pop change the batch they are called on
        return DataProto(batch.batch.clone(recurse=False), dict(batch.non_tensor_batch), dict(batch.meta_info))

    calls: dict[str, Callable[[Any], Any]] = {
        "chunk": lambda it: it.chunk(8),
        "chunk+concat": lambda it: DataProto.concat(it.chunk(8)),
        "repeat": lambda it: it.repeat(8, interleave=True),
        "reorder": lambda it: it.reorder(order),
        "union": lambda it: it.union(more),
        "select": lambda it: it.select(batch_keys=["input_ids", "advantages"]),
        "pop": lambda it: it.pop(batch_keys=["input_ids"], non_tensor_batch_keys=["uid"]),
        "iterate": lambda it: list(it.make_iterator(128, 1, seed=0, dataloader_kwargs={"shuffle": True})),
        "pickle": _round_trip,
    }
    return (copy if name in ("reorder", "union", "pop") else lambda: batch), calls[name]


def _round_trip(batch: Any) -> Any:
    buffers: list[Any] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers)


def measure(library: str, name: str, rows: int, width: int, repeats: int) -> dict[str, float]:
    """Runs one operation in this process."""
    make, call = operation(library, name, rows, width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = call(make())
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    del result
    clock = time.perf_counter if name == "ray" else time.process_time  # Ray's work is in other processes, too

    def mean(calls: int) -> float:
        batches = [make() for _ in range(calls)]
        start = clock()
        for batch in batches:
            call(batch)
        return (clock() - start) / calls

    calls = min(1000, max(1, round(0.01 / mean(1))))
    return {"seconds": min(mean(calls) for _ in range(repeats)), "peak_mib": peak}


def empty_rpc(calls: int) -> tuple[float, float]:
    """Seconds of an empty call to 4 workers: through a Podium worker group, and by bare Ray."""
    import ray

    from podium.protocol import ClassWithInitArgs, Dispatch, ResourcePool, Worker, make_backend, register

    class Idle(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def nothing(self) -> None:
            pass

    class Bare:
        def nothing(self) -> None:
            pass

    def round_of(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    with make_backend("ray", num_cpus=8) as backend:
        group = backend.start_group(ResourcePool([4]), ClassWithInitArgs(Idle), name="idle")
        actors = [ray.remote(num_cpus=1)(Bare).remote() for _ in range(4)]
        # In turn, so that what else the machine does weighs on both alike.
        rounds = [
            (round_of(group.nothing), round_of(lambda: ray.get([actor.nothing.remote() for actor in actors])))
            for _ in range(20)
        ]
        return min(ours for ours, _ in rounds[1:]), min(bare for _, bare in rounds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl-python", help="Python of an environment with verl")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", nargs=2, metavar=("LIBRARY", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        library, name = options.worker
        print(json.dumps(measure(library, name, options.rows, options.width, options.repeats)))
        return
    if not options.verl_python:
        print("verl is not measured: give --verl-python, the Python of an environment with verl 0.9.1")
    print(f"{options.rows} x {options.width} x 6 columns and 4 object columns, best of {options.repeats}\n")
    print("| Operation | Podium ms | verl ms | faster | Podium MiB | verl MiB |")
    print("|---|---|---|---|---|---|")
    # Freed memory stays with the process. Else whether a call's pages are new, which costs more than most operations,
    # is a matter of where the heap happens to end.
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    shape = ["--rows", str(options.rows), "--width", str(options.width), "--repeats", str(options.repeats)]
    for name in OPERATIONS:
        ours = measure_apart(sys.executable, __file__, "podium", name, shape)
        row = [name, f"{ours['seconds'] * 1e3:.3g}", "", "", f"{ours['peak_mib']:.0f}", ""]
        if options.verl_python:
            theirs = measure_apart(options.verl_python, __file__, "verl", name, shape)
            row[2:4] = [f"{theirs['seconds'] * 1e3:.3g}", f"{theirs['seconds'] / ours['seconds']:.1f}x"]
            row[5] = f"{theirs['peak_mib']:.0f}"
        print("| " + " | ".join(row) + " |", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
    group, bare = empty_rpc(200)
    print(f"\nempty call to 4 Ray workers: {group * 1e3:.2f} ms, by bare Ray {bare * 1e3:.2f} ms ({group / bare:.2f}x)")


if __name__ == "__main__":
    main()
