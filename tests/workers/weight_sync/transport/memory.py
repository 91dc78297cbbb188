"""How much memory a process of a sync takes beside its weights."""

import ctypes
import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from podium.workers.rollout.hf import HFRollout
from podium.workers.weight_sync.connection import connect, describe
from podium.workers.weight_sync.transport.base import SyncSettings
from tests.workers.weight_sync.forked import processes
from tests.workers.weight_sync.transport.stage import rows_of


def growth(transport: str, path: str, dtype: str, settings: SyncSettings) -> dict[str, int]:
    """Bytes by which each process grew at most while it connected and synced, by what it does.

    One trains (in float32) and another generates; with colocated, one does both.
    """
    ends = [(True, True)] if transport == "colocated" else [(True, False), (False, True)]
    pipes, running = [], []
    for end in ends:
        pipe, other = processes.Pipe()
        running.append(processes.Process(target=_take_part, args=(other, path, dtype, *end), daemon=True))
        running[-1].start()
        pipes.append(pipe)
    try:
        for _ in range(2):  # the first takes what a process takes once
            endpoints = [pipe.recv() for pipe in pipes]
            for rank, pipe in enumerate(pipes):
                pipe.send((transport, endpoints, rank, settings))
            grown = [pipe.recv() for pipe in pipes]
    finally:
        for process in running:
            process.kill()
    return dict(zip(["trains", "generates"] if len(ends) == 2 else ["both"], grown, strict=True))


def _take_part(pipe: Any, path: str, dtype: str, trains: bool, generates: bool) -> None:
    os.environ |= {"PODIUM_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    engine = HFRollout(path, dtype=dtype, max_num_seqs=4) if generates else None
    source = partial(rows_of, AutoModelForCausalLM.from_pretrained(path), 0, 1) if trains else None
    for version in range(2):
        pipe.send(describe("actor" if trains else "rollout", source, engine))
        arguments = pipe.recv()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free would be taken first
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
        before = _peak()
        connection = connect(*arguments, source, engine)
        connection.sync(version)
        pipe.send(_peak() - before)
        connection.close()


def _peak() -> int:
    """Bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
