"""How weights travel, by name."""

import importlib

from podium.utils.errors import UserError
from podium.workers.weight_sync.transport.base import TRANSPORT_KEY, Transport

_TRANSPORTS = {
    "colocated": "podium.workers.weight_sync.transport.colocated:ColocatedTransport",
    "ipc": "podium.workers.weight_sync.transport.ipc:IPCTransport",
    "broadcast": "podium.workers.weight_sync.transport.broadcast:BroadcastTransport",
}


def register_transport(name: str, path: str) -> None:
    """Makes ``module:Class`` the transport that ``weight_sync.transport=name`` chooses.

    Raises:
        UserError: the name is taken.
    """
    if _TRANSPORTS.setdefault(name, path) != path:
        raise UserError(f"weight-sync transport {name} is {_TRANSPORTS[name]}: choose another name for {path}")


def get_transport(name: str) -> type[Transport]:
    """The transport registered under `name`.

    Raises:
        UserError: there is none.
    """
    if name not in _TRANSPORTS:
        raise UserError(f"{TRANSPORT_KEY}={name}: expected auto or one of {', '.join(_TRANSPORTS)}")
    module, _, attribute = _TRANSPORTS[name].partition(":")
    transport: type[Transport] = getattr(importlib.import_module(module), attribute)
    return transport
