"""Ports that are held from when they are chosen until somebody listens on them: nobody is given them in between.

The socket that holds one is bound and does not listen: the system hands the port to nobody who asks for a free one, and
a worker's own torch.distributed can still listen there.
"""

import ipaddress
import os
import socket

_held: dict[str, socket.socket] = {}


def reserve_port(host: str, purpose: str) -> int:
    """A port of this machine, held by this process until `take_listener`; the one it held for `purpose` before, not.

    Args:
        host: address that others will use; where it is the loopback's, nobody else can reach the port.
    """
    release_port(purpose)
    _held[purpose] = holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host if is_loopback(host) else "", 0))
    return int(holder.getsockname()[1])


def release_port(purpose: str) -> None:
    """Lets the port go."""
    if purpose in _held:
        _held.pop(purpose).close()


def lend_port(purpose: str) -> int:
    """The descriptor of a held port's socket, for a child that calls `inherit_port`."""
    return _held[purpose].fileno()


def inherit_port(descriptor: int, purpose: str) -> None:
    """Holds the port that the parent lent."""
    _held[purpose] = socket.socket(fileno=descriptor)


def take_listener(port: int) -> int | None:
    """The descriptor of a socket that listens on a port held here, the caller's from now on; None of any other port."""
    for purpose, holder in _held.items():
        if holder.getsockname()[1] == port:
            holder.listen(1024)
            return _held.pop(purpose).detach()
    return None


def is_loopback(host: str) -> bool:
    """Whether an address is one of this machine only."""
    return os.path.exists("/sys/class/net/lo") and ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
