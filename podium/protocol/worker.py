"""``Worker``: the base class of everything that runs on a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from podium.protocol.dispatch import MEGATRON_MESH, MEGATRON_PP_AS_DP_MESH


@dataclass
class ProcessContext:
    """What a process knows of its place in its group, and the roles that live in it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    roles: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_env(cls) -> ProcessContext:
        """From RANK, WORLD_SIZE and so on; one rank where they are absent."""
        env = os.environ
        return cls(
            int(env.get("RANK", 0)),
            int(env.get("WORLD_SIZE", 1)),
            int(env.get("LOCAL_RANK", 0)),
            int(env.get("LOCAL_WORLD_SIZE", 1)),
            env.get("MASTER_ADDR", "127.0.0.1"),
            int(env.get("MASTER_PORT", 29500)),
        )

    def env(self) -> dict[str, str]:
        """The variables torch.distributed and launchers' users expect."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


_constructing: ProcessContext | None = None


@contextmanager
def constructing(context: ProcessContext) -> Iterator[None]:
    """Workers made inside belong to ``context``."""
    global _constructing
    before, _constructing = _constructing, context
    try:
        yield
    finally:
        _constructing = before


class Worker:
    """A role on one rank.

    Attributes (set before ``__init__`` runs, also where a subclass does not call ``super().__init__()``):
        rank, world_size: place in the group.
        local_rank, local_world_size: place among the group's ranks on this node.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        self = super().__new__(cls)
        context = _constructing or ProcessContext.from_env()
        self.__dict__.update(
            _context=context,
            _meshes={},
            rank=context.rank,
            world_size=context.world_size,
            local_rank=context.local_rank,
            local_world_size=context.local_world_size,
        )
        return self

    @property
    def role(self) -> str:
        """The name that it has in this process."""
        return next(name for name, worker in self.__dict__["_context"].roles.items() if worker is self)

    def peer(self, role: str) -> Any:
        """The instance of ``role`` in this process, or None where it lives elsewhere (or is not constructed yet)."""
        return self.__dict__["_context"].roles.get(role)

    def register_mesh(self, mesh: str, dp_rank: int, is_collect: bool) -> None:
        """Say which shard this rank gets in a mesh, and whether its answer is the one that counts for the shard."""
        self.__dict__["_meshes"][mesh] = (dp_rank, is_collect)

    _register_dispatch_collect_info = register_mesh

    def register_megatron_mesh(
        self,
        *,
        dp_rank: int,
        pp_rank: int = 0,
        pp_size: int = 1,
        tp_rank: int = 0,
        cp_rank: int = 0,
    ) -> None:
        """Place this rank for ``MEGATRON_COMPUTE_PROTO`` and ``MEGATRON_PP_AS_DP_PROTO``.

        The last pp stage has the logits, so its tp rank 0, cp rank 0 answers.
        """
        first = tp_rank == 0 and cp_rank == 0
        self.register_mesh(MEGATRON_MESH, dp_rank, first and pp_rank == pp_size - 1)
        self.register_mesh(MEGATRON_PP_AS_DP_MESH, dp_rank * pp_size + pp_rank, first)
