"""Both ends of a sync in one process."""

from typing import Any

from podium.workers.rollout.base import RolloutEngine
from podium.workers.weight_sync.connection import connect, describe
from podium.workers.weight_sync.transport.base import SyncSettings, Transport


def connected(engine: Any, rollout: RolloutEngine, **settings: Any) -> Transport:
    """The colocated transport from a training engine on one rank to the rollout beside it."""
    end = describe("rank 0", engine.pieces, rollout)
    return connect("colocated", [end], 0, SyncSettings(**settings), engine.pieces, rollout)
