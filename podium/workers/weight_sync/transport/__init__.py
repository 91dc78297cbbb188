"""How weights travel, by name."""

import importlib

from podium.utils.errors import UserError
from podium.workers.weight_sync.transport.base import TRANSPORT_KEY, Transport

_TRANSPORTS = {
    "colocated": "podium.workers.weight_sync.transport.colocated:ColocatedTransport",
    "memory_buffer": "podium.workers.weight_sync.transport.memory_buffer:MemoryBufferTransport",
    "ipc": "podium.workers.weight_sync.transport.ipc:IPCTransport",
    "broadcast": "podium.workers.weight_sync.transport.broadcast:BroadcastTransport",
    "sharded": "podium.workers.weight_sync.transport.sharded:ShardedTransport",
}


def get_transport(name: str) -> type[Transport]:
    """The transport of that name, a weight buffer's included.

    Raises:
        UserError: there is none.
    """
    # Imported late: they import this package.
    from podium.workers.weight_sync.transport.buffered import BufferedTransport
    from podium.workers.weight_sync.weight_buffer import WEIGHT_BUFFERS

    if name in WEIGHT_BUFFERS:
        return BufferedTransport.over(name)
    if name not in _TRANSPORTS:
        known = ", ".join(["auto", *_TRANSPORTS, *WEIGHT_BUFFERS])
        raise UserError(f"{TRANSPORT_KEY}={name}: expected one of {known}")
    module, _, attribute = _TRANSPORTS[name].partition(":")
    transport: type[Transport] = getattr(importlib.import_module(module), attribute)
    return transport
