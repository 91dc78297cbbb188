"""A weight sync between real processes: trainers that hold rows of one tiny model, and rollout engines."""

from __future__ import annotations

import os
import re
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from podium.models.hf_layout import checkpoint_pieces
from podium.utils.device import tcp_store
from podium.utils.memory_buffer import (
    FlatStage,
    MegatronMemoryBufferForRollout,
    WeightBuffers,
    build_memory_buffer,
    build_memory_reference,
)
from podium.utils.piece import Piece
from podium.workers.rollout.hf import HFRollout
from podium.workers.weight_sync.checksum import tensor_checksum
from podium.workers.weight_sync.connection import connect, describe
from podium.workers.weight_sync.snapshot import remove_stale
from podium.workers.weight_sync.transport.base import Sync, SyncSettings, Transport
from tests.models.tiny import tiny_model
from tests.workers.weight_sync.forked import processes

ARCHITECTURE = "qwen2"
IN_ONE_WORLD = ("colocated", "memory_buffer")
"""Transports over the ranks of a world."""
Moments = dict[str, tuple[type, str, int]]
"""By transport (``packed``: those not named): a method, and the call of it after which something happens."""
MOMENTS: dict[str, Moments] = {
    "sends": {
        "packed": (Sync, "pack", 2),
        "colocated": (Sync, "lend", 2),
        "broadcast": (Sync, "lend", 2),
        "memory_buffer": (MegatronMemoryBufferForRollout, "flat", 3),  # before its own stage, the last, is sent
    },
    "receives": {
        "packed": (Sync, "deliver", 1),
        "colocated": (Sync, "settle", 1),
        "broadcast": (Sync, "settle", 1),
        "memory_buffer": (Sync, "copy", 1),
    },
    "flips": {
        "packed": (Sync, "pack", 1),
        "colocated": (Sync, "lend", 1),
        "broadcast": (Sync, "lend", 1),
        "memory_buffer": (MegatronMemoryBufferForRollout, "flat", 2),  # the first is for the checksum
    },
}


def policy(version: int) -> torch.nn.Module:
    """The model as it is at a version: each differs from the others in every element."""
    return tiny_model(ARCHITECTURE, seed=100 + version)


def checksums(version: int, dtype: torch.dtype) -> dict[str, int]:
    return {name: tensor_checksum(p.detach().to(dtype)) for name, p in policy(version).named_parameters()}


def rows_of(module: torch.nn.Module, index: int, count: int) -> list[Piece]:
    """The rows that one of `count` trainers holds: chunks of equal size, the last shorter, as FSDP shards."""
    shards = []
    for name, parameter in module.named_parameters():
        size = -(-len(parameter) // count)
        rows = parameter.data[index * size : (index + 1) * size]
        shards.append((name, (min(index * size, len(parameter)), *(0,) * (parameter.dim() - 1)), rows))
    return checkpoint_pieces(module.config.model_type, shards)


def pipeline_stage(module: torch.nn.Module, index: int, count: int) -> FlatStage:
    """Moves every `count`-th parameter, from number `index` on, into flat memory: that rank's stage of a pipeline."""
    own = dict(list(module.named_parameters())[index::count])
    meta = {name: {"shape": parameter.shape, "dtype": parameter.dtype} for name, parameter in own.items()}
    buffers = build_memory_buffer(meta)
    for name, view in build_memory_reference(meta, buffers).items():
        own[name].data = view.copy_(own[name].data)
    return FlatStage(tuple(range(count)), meta, buffers, partial(stage_pieces, module.config.model_type))


def stage_pieces(model_type: str, weights: WeightBuffers) -> list[Piece]:
    whole = [(name, (0,) * tensor.dim(), tensor) for stage in weights for name, tensor in stage.items()]
    return checkpoint_pieces(model_type, whole)


class Actor:
    """What runs in one process.

    Args:
        source: (index, count) of its rows (of its parameters, with `pipeline`); None for a process that trains nothing.
        model_dir: of the engine; None for a process without.
        pipeline: its trainer is a stage of a pipeline.
    """

    def __init__(
        self, label: str, source: tuple[int, int] | None, model_dir: str | None, dtype: str, pipeline: bool = False
    ):
        self._label = label
        self._module = policy(0)
        self._engine = HFRollout(model_dir, dtype=dtype, max_num_seqs=4) if model_dir is not None else None
        self._transport: Transport | None = None
        self._source: Callable[[], list[Piece]] | None = None
        self._stage: Callable[[], FlatStage | None] = lambda: None
        if source is not None and pipeline:
            stage = pipeline_stage(self._module, *source)
            weights = build_memory_reference(stage.meta, stage.buffers)
            self._source, self._stage = partial(stage.transform, [weights]), lambda: stage
        elif source is not None:
            self._source = partial(rows_of, self._module, *source)

    def endpoint(self) -> Any:
        return describe(self._label, self._source, self._engine, self._stage)

    def connect(self, transport: str, endpoints: Sequence[Any], rank: int, settings: SyncSettings) -> None:
        self.close()
        if transport in IN_ONE_WORLD and len(endpoints) > 1:
            self._join(endpoints, rank, settings.timeout_s)
        self._transport = connect(transport, endpoints, rank, settings, self._source, self._engine, self._stage)

    def _join(self, endpoints: Sequence[Any], rank: int, timeout_s: float) -> None:
        """Makes a world, as roles that share processes have one; a member of the last may have died."""
        if dist.is_initialized():
            dist.destroy_process_group()
        (host, port), timeout = endpoints[0].rendezvous, timedelta(seconds=timeout_s)
        store = tcp_store(host, port, rank == 0, timeout, len(endpoints))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(endpoints), timeout=timeout)

    def train(self, version: int) -> None:
        self._module.load_state_dict(policy(version).state_dict())

    def sync(self, version: int) -> Any:
        assert self._transport is not None
        try:
            return self._transport.sync(version)
        except BaseException:
            self.close()  # as a role does
            raise

    def held(self) -> tuple[int, dict[str, int]]:
        """The engine's version, and the checksums of what generation uses."""
        assert self._engine is not None
        return self._engine.weight_version, {p.name: tensor_checksum(p.tensor) for p in self._engine.pieces()}

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def die_when(self, moment: str) -> None:
        """Kills this process while it ``sends`` or ``receives``."""
        self._at(moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    def limit_files(self, nbytes: int) -> None:
        """Files can then not be made longer than that: what a full file system does, for one process."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    def flip_a_bit(self) -> None:
        """In what is sent first, once its checksum has been taken."""
        self._at("flips", _flip)

    def _at(self, moment: str, fault: Callable[..., None]) -> None:
        assert self._transport is not None
        owner, method, call = MOMENTS[moment].get(self._transport.name, MOMENTS[moment]["packed"])
        original, calls = getattr(owner, method), 0

        def faulty(*args: Any) -> Any:
            nonlocal calls
            result = original(*args)
            calls += 1
            if calls == call:
                fault(result, *args)
            return result

        setattr(owner, method, faulty)


def _flip(result: Any, *args: Any) -> None:
    """In the middle of what a call of `pack`, `lend` or `flat` has filled, or given."""
    if isinstance(result, int):
        _, lane, index, buffer = args
        buffer[lane.buckets[index].nbytes // 2] ^= 1
    else:
        first = (result[0] if isinstance(result, tuple) else result)[0].view(torch.uint8)
        first[len(first) // 2] ^= 1


def _serve(pipe: Any, args: tuple[Any, ...]) -> None:
    os.environ |= {"PODIUM_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    actor = Actor(*args)
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(actor, name)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Remote:
    """An `Actor` in a process of its own."""

    def __init__(self, *args: Any):
        self._pipe, other = processes.Pipe()
        self.args = args
        self.process = processes.Process(target=_serve, args=(other, args), daemon=True)
        self.process.start()
        other.close()

    def start(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the call returned; the traceback of its failure, as an error."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{self.args[0]} does not answer")
        works, value = self._pipe.recv()
        if not works:
            raise RuntimeError(value)
        return value

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


@dataclass
class Outcome:
    """Of a sync, by the label of each process."""

    reports: dict[str, Any]
    errors: dict[str, str]
    """Tracebacks."""
    dead: list[str]

    def assert_named(self, *versions: int) -> None:
        """Every failure says which version (one of these), which process and which phase."""
        for label, error in self.errors.items():
            last = error.strip().splitlines()[-1]
            known = "|".join(map(str, versions))
            assert re.match(rf".*WeightSyncError: weight sync ({known}): {label}: [^:]+: .+", last), error


class Stage:
    """Processes that take part in a sync.

    Args:
        sources: processes that train, each with its rows.
        destinations: engines; with `colocated` they are in the first processes that train.
        pipeline: the processes that train are the stages of a pipeline.
    """

    def __init__(
        self,
        model_dir: str,
        sources: int,
        destinations: int,
        *,
        colocated: bool,
        dtype: str = "float32",
        pipeline: bool = False,
    ):
        self._dtype = getattr(torch, dtype)
        engines = [model_dir] * destinations
        cast: list[tuple[Any, ...]] = []
        for index in range(sources):
            engine = engines.pop() if colocated and engines else None
            cast.append((f"actor rank {index}", (index, sources), engine, dtype, pipeline))
        cast += [(f"rollout rank {index}", None, engine, dtype) for index, engine in enumerate(engines)]
        self.remotes = [Remote(*args) for args in cast]
        self.transport = ""
        self.version, self._tried = -1, -1

    @property
    def engines(self) -> list[Remote]:
        return [remote for remote in self.remotes if remote.args[2] is not None]

    @property
    def next_version(self) -> int:
        """Larger than any that was tried."""
        return self._tried + 1

    def connect(self, transport: str, **settings: Any) -> None:
        self.transport = transport
        settings = {"bucket_bytes": 60_000, "timeout_s": 20.0, **settings}
        endpoints = [remote("endpoint") for remote in self.remotes]
        for rank, remote in enumerate(self.remotes):
            remote.start("connect", transport, endpoints, rank, SyncSettings(**settings))
        for remote in self.remotes:
            remote.result()

    def sync(self, version: int, received_as: int | None = None) -> Outcome:
        """Trains to a version, and syncs it; `received_as` is what those that only receive, or else the last engine,
        are told that it is."""
        self._tried = max(version, received_as or version)
        for remote in self.remotes:
            remote("train", version)
        for remote in self.remotes:
            receives = remote.args[1] is None or remote is self.engines[-1]
            remote.start("sync", received_as if receives and received_as is not None else version)
        outcome = Outcome({}, {}, [])
        for remote in self.remotes:
            label = remote.args[0]
            try:
                outcome.reports[label] = remote.result()
            except EOFError:
                outcome.dead.append(label)
            except RuntimeError as error:
                outcome.errors[label] = str(error)
        return outcome

    def synced(self, version: int) -> None:
        """Syncs a version; then every engine says that it has it, and has it, bit for bit."""
        outcome = self.sync(version)
        assert not outcome.errors and not outcome.dead, outcome
        expected = checksums(version, self._dtype)
        for remote in self.engines:
            assert remote("held") == (version, expected), remote.args[0]
        self.version = version

    def assert_whole_or_refused(self, version: int, outcome: Outcome, *, whole: bool) -> None:
        """Engines that failed have all of `version` and say so; without `whole` they may refuse to generate."""
        expected = checksums(version, self._dtype)
        for remote in self.engines:
            if remote.args[0] in outcome.errors:
                held = remote("held")
                assert held == (version, expected) or (held[0] == -1 and not whole), (remote.args[0], held[0])

    def restart_the_dead(self) -> None:
        """Starts the processes anew that were killed."""
        for index, remote in enumerate(self.remotes):
            remote.process.join(0.1)
            if not remote.process.is_alive():
                self.remotes[index] = Remote(*remote.args)

    def close(self) -> None:
        for remote in self.remotes:
            remote.kill()
        remove_stale()
