"""Weight sync by each transport: GB/s, beside what this machine copies and what a bare gloo broadcast carries.

    python benchmarks/weight_sync.py [--sizes 10M 135M 500M] [--transports colocated memory_buffer ipc ...]

One process trains and, except for colocated, another generates: bfloat16 tensors with the shapes of real layers, in the
rollout fused as vLLM fuses them. For memory_buffer, each of two processes trains half of the layers, as a stage of a
pipeline, and generates with all of them. A figure is the best of ``--repeats`` rounds; a round times each thing once,
one right after the other, so that what else the machine does hits all alike. "CPU" compares CPU seconds, of the busier
process: a figure for a machine with free cores. Verification is part of the last column's time only. At 135M also the
way of one call and one handle a parameter, as in the first version of ChatLearn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
import torch.distributed as dist

from podium.protocol.backend import free_port
from podium.utils.memory_buffer import FlatStage, WeightBuffers, build_memory_buffer, build_memory_reference
from podium.utils.piece import Piece
from podium.workers.rollout.base import Output, Request, RolloutEngine
from podium.workers.weight_sync.connection import connect, describe
from podium.workers.weight_sync.transport.base import SyncSettings, Transport

# hidden, intermediate, layers, heads, key heads, head size, vocabulary; embeddings are tied.
SHAPES = {
    "10M": (256, 768, 8, 4, 2, 64, 12_288),
    "135M": (576, 1536, 30, 9, 3, 64, 49_152),  # SmolLM2
    "500M": (896, 4864, 24, 14, 2, 64, 151_936),  # Qwen2.5
}
TRANSPORTS = ("colocated", "memory_buffer", "ipc", "cpu", "sharded", "broadcast")
DTYPE = torch.bfloat16
TIMEOUT_S = 600.0


def fused_shapes(size: str) -> list[list[tuple[str, int, int]]]:
    """The rollout's parameters: each a list of the checkpoint's tensors that it stacks, (name, rows, columns)."""
    hidden, wide, layers, heads, key_heads, head, vocabulary = SHAPES[size]
    parameters = [[("model.embed_tokens.weight", vocabulary, hidden)], [("model.norm.weight", hidden, 1)]]
    for layer in range(layers):
        name = f"model.layers.{layer}."
        attention, mlp = name + "self_attn.", name + "mlp."
        parameters += [
            [
                (attention + "q_proj.weight", heads * head, hidden),
                (attention + "k_proj.weight", key_heads * head, hidden),
                (attention + "v_proj.weight", key_heads * head, hidden),
            ],
            [(attention + "o_proj.weight", hidden, heads * head)],
            [(mlp + "gate_proj.weight", wide, hidden), (mlp + "up_proj.weight", wide, hidden)],
            [(mlp + "down_proj.weight", hidden, wide)],
            [(name + "input_layernorm.weight", hidden, 1)],
            [(name + "post_attention_layernorm.weight", hidden, 1)],
        ]
    return parameters


def bytes_of(size: str) -> int:
    """Of all parameters."""
    return sum(rows * columns for stacked in fused_shapes(size) for _, rows, columns in stacked) * DTYPE.itemsize


def trainer_pieces(size: str) -> list[Piece]:
    """Tensors of the checkpoint, each with memory of its own."""
    whole = [part for stacked in fused_shapes(size) for part in stacked]
    return [piece(name, torch.randn(rows, columns).to(DTYPE)) for name, rows, columns in whole]


def rollout_pieces(size: str) -> list[Piece]:
    """The same tensors as rows of fused parameters."""
    pieces = []
    for stacked in fused_shapes(size):
        parameter = torch.zeros(sum(rows for _, rows, _ in stacked), stacked[0][2], dtype=DTYPE)
        parts = parameter.split([rows for _, rows, _ in stacked])
        pieces += [piece(name, part) for (name, _, _), part in zip(stacked, parts, strict=True)]
    return pieces


def piece(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, (0, 0), tuple(tensor.shape), tensor)


def as_stage(pieces: list[Piece]) -> FlatStage:
    """Moves them into flat memory: a stage of a pipeline, of one chunk, of processes 0 and 1."""
    meta = {each.name: {"shape": each.tensor.shape, "dtype": DTYPE} for each in pieces}
    buffers = build_memory_buffer(meta)
    for view, each in zip(build_memory_reference(meta, buffers).values(), pieces, strict=True):
        view.copy_(each.tensor)
    return FlatStage((0, 1), meta, buffers, in_stages)


def in_stages(weights: WeightBuffers) -> list[Piece]:
    return [piece(name, tensor) for stage in weights for name, tensor in stage.items()]


class BareEngine(RolloutEngine):
    """Weights that can be synced, and nothing to generate with."""

    num_unfinished = 0

    def __init__(self, size: str):
        super().__init__()
        self._pieces = rollout_pieces(size)

    def pieces(self) -> list[Piece]:
        return self._pieces

    def _enqueue(self, request: Request) -> None:
        raise AssertionError

    def step(self) -> list[Output]:
        return []

    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        return []

    def drop_caches(self) -> None:
        """There are none."""

    def shutdown(self) -> None:
        """Nothing to free."""


Seconds = tuple[float, float]
"""By the clock, and of the CPU."""


class Stopwatch:
    """Times a ``with`` block."""

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds: Seconds = time.perf_counter() - self._began[0], time.process_time() - self._began[1]


class Side:
    """What one process does when it is told.

    Args:
        stage: of a pipeline of two, which is what it trains.
    """

    def __init__(self, size: str, trains: bool, generates: bool, stage: int | None = None):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._pieces = trainer_pieces(size) if trains else []
        self._engine = BareEngine(size) if generates else None
        self._transport: Transport | None = None
        self._version = 0
        nbytes = bytes_of(size)
        self._stage: FlatStage | None = None
        if stage is not None:
            half = len(self._pieces) // 2
            self._stage = flat = as_stage(self._pieces[half:] if stage else self._pieces[:half])
            self._pieces = in_stages([build_memory_reference(flat.meta, flat.buffers)])
        self._flat = torch.ones(nbytes, dtype=torch.uint8)
        self._other = torch.zeros(nbytes, dtype=torch.uint8)

    def endpoint(self, label: str) -> Any:
        return describe(label, (lambda: self._pieces) if self._pieces else None, self._engine, lambda: self._stage)

    def connect(self, transport: str, endpoints: list[Any], rank: int, verify: str) -> None:
        if self._transport is not None:
            self._transport.close()
        source = (lambda: self._pieces) if self._pieces else None
        settings = SyncSettings(verify, timeout_s=TIMEOUT_S)
        self._transport = connect(transport, endpoints, rank, settings, source, self._engine, lambda: self._stage)

    def sync(self) -> Seconds:
        assert self._transport is not None
        with Stopwatch() as watch:
            self._transport.sync(self._version)
        self._version += 1
        return watch.seconds

    def copy(self) -> Seconds:
        """One copy of all bytes, from one buffer to another."""
        with Stopwatch() as watch:
            self._other.copy_(self._flat)
        return watch.seconds

    def join(self, rank: int, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=TIMEOUT_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    def broadcast(self) -> Seconds:
        """All bytes as one tensor, from rank 0."""
        dist.barrier()
        with Stopwatch() as watch:
            dist.broadcast(self._flat, 0)
            dist.barrier()
        return watch.seconds

    def offer(self, index: int) -> str:
        """One parameter in shared memory of its own; returns the handle."""
        tensor = self._pieces[index].tensor
        self._shared = SharedMemory(create=True, size=tensor.nbytes)
        torch.frombuffer(self._shared.buf, dtype=DTYPE, count=tensor.numel()).view_as(tensor).copy_(tensor)
        return self._shared.name

    def take(self, index: int, handle: str) -> None:
        assert self._engine is not None
        shared, tensor = SharedMemory(handle), self._engine.pieces()[index].tensor
        tensor.copy_(torch.frombuffer(shared.buf, dtype=DTYPE, count=tensor.numel()).view_as(tensor))
        shared.unlink()


class Process:
    """A `Side` in a process of its own; a call is one message there and one back."""

    def __init__(self, *args: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, args), daemon=True)
        self._process.start()

    def start(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def result(self) -> Any:
        return self._pipe.recv()

    def __call__(self, method: str, *args: Any) -> Any:
        self.start(method, *args)
        return self.result()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, args: tuple[Any, ...]) -> None:
    os.environ |= {"PODIUM_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1"}
    side = Side(*args)
    while True:
        method, arguments = pipe.recv()
        pipe.send(getattr(side, method)(*arguments))


def together(processes: list[Process], method: str) -> Seconds:
    """Calls all at once; the most seconds, of either kind."""
    for process in processes:
        process.start(method)
    clock, cpu = zip(*(process.result() for process in processes), strict=True)
    return max(clock), max(cpu)


def joined(processes: list[Process]) -> None:
    """Makes them a world."""
    port = free_port()
    for rank, process in enumerate(processes):
        process.start("join", rank, port)
    for process in processes:
        process.result()


def connected(processes: list[Process], transport: str, verify: str) -> None:
    labels = ["rank 0", "rank 1"]
    endpoints = [process("endpoint", label) for process, label in zip(processes, labels, strict=False)]
    for rank, process in enumerate(processes):
        process.start("connect", transport, endpoints, rank, verify)
    for process in processes:
        process.result()


def measure(size: str, transports: list[str], repeats: int) -> None:
    """Prints the rows of one size."""
    nbytes = bytes_of(size)
    for transport in transports:
        if transport == "colocated":
            processes = [Process(size, True, True)]
        elif transport == "memory_buffer":
            processes = [Process(size, True, True, stage) for stage in range(2)]
        else:
            processes = [Process(size, True, False), Process(size, False, True)]
        things: dict[str, Callable[[], Seconds]] = {"copy": lambda p=processes: p[-1]("copy")}
        if transport in ("broadcast", "memory_buffer"):
            joined(processes)
        if transport == "broadcast":
            things["gloo"] = lambda p=processes: together(p, "broadcast")
        things["sync"] = lambda p=processes: together(p, "sync")
        connected(processes, transport, "off")
        best = best_of(things, repeats)
        connected(processes, transport, "full")
        verified = best_of({"sync": things["sync"]}, repeats // 2)["sync"]
        row = [size, transport, f"{best['sync'][0] * 1e3:.0f}", f"{nbytes / best['sync'][0] / 1e9:.2f}"]
        row += [f"{nbytes / best['copy'][0] / 1e9:.2f}", *shares(best, "copy"), *shares(best, "gloo")]
        row += ["1", f"{verified[0] * 1e3:.0f}"]
        print("| " + " | ".join(row) + " |", flush=True)
        for process in processes:
            process.end()


def shares(best: dict[str, Seconds], of: str) -> list[str]:
    """How fast a sync is beside something else, by the clock and by the CPU."""
    return (
        [f"{other / sync:.2f}" for other, sync in zip(best[of], best["sync"], strict=True)] if of in best else ["", ""]
    )


def best_of(things: dict[str, Callable[[], Seconds]], repeats: int) -> dict[str, Seconds]:
    """Least seconds of each, of either kind, after one round that warms up."""
    rounds = [{name: thing() for name, thing in things.items()} for _ in range(repeats + 1)][1:]
    return {name: (min(each[name][0] for each in rounds), min(each[name][1] for each in rounds)) for name in things}


def measure_per_parameter(size: str, repeats: int) -> None:
    """Prints what one call and one handle a parameter takes, beside ipc."""
    processes = [Process(size, True, False), Process(size, False, True)]
    source, destination = processes
    count = sum(len(stacked) for stacked in fused_shapes(size))
    connected(processes, "ipc", "off")

    def one_by_one() -> Seconds:
        with Stopwatch() as watch:
            for index in range(count):
                destination("take", index, source("offer", index))
        return watch.seconds

    def at_once() -> Seconds:
        with Stopwatch() as watch:
            together(processes, "sync")
        return watch.seconds

    best = best_of({"ipc": at_once, "one": one_by_one}, repeats)
    print(
        f"\n{size}: {2 * count} calls and {count} handles, {best['one'][0] * 1e3:.0f} ms; ipc, 2 calls, "
        f"{best['ipc'][0] * 1e3:.0f} ms: {best['one'][0] / best['ipc'][0]:.1f}x"
    )
    for process in processes:
        process.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    columns = "Parameters | Transport | ms | GB/s | copy GB/s | of copy | CPU | of gloo | CPU | messages | verified ms"
    print(f"| {columns} |\n|{'---|' * 11}")
    for size in options.sizes:
        measure(size, options.transports, options.repeats)
    if "ipc" in options.transports and "135M" in options.sizes:
        measure_per_parameter("135M", options.repeats)


if __name__ == "__main__":
    main()
