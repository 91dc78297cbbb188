"""The process of one local rank: ``python -m podium.protocol.local_child FD PARENT_PID [FD_OF_THE_WORLDS_PORT]``.

A module of its own, so that starting a rank never runs the user's ``__main__`` again.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any

from podium.protocol.errors import WorkerError
from podium.protocol.host import RoleHost, portable
from podium.protocol.wire import Message, encode, receive, send
from podium.utils.errors import UserError
from podium.utils.ports import inherit_port

CONSTRUCT, CALL, EXIT, VALUE, ERROR = range(5)


def main() -> None:
    """Serve calls until told to exit; die with the parent, whatever this process is doing then."""
    faulthandler.enable()
    sock = socket.socket(fileno=int(sys.argv[1]))
    for descriptor in sys.argv[3:]:
        inherit_port(int(descriptor), "world")
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sock, inbox), daemon=True).start()
    threading.Thread(target=_watch_parent, args=(int(sys.argv[2]),), daemon=True).start()
    host: RoleHost | None = None
    while (message := inbox.get()).kind != EXIT:
        try:
            if message.kind == CONSTRUCT:
                context, roles = message.content()
                host = RoleHost(context)
                host.construct(roles)
                value = None
            else:
                assert host is not None, "CALL before CONSTRUCT"
                role, method, args, kwargs, answer = message.content()
                value = host.call(role, method, args, kwargs, answer)
                del args, kwargs
            reply = Message(message.number, VALUE, encode(value))
            del value
        except (WorkerError, UserError) as e:
            reply = Message(message.number, ERROR, encode(portable(e)))
        except Exception as e:  # arguments that do not unpickle, results that do not pickle
            rank = host.context.rank if host else None
            text = f"rank {rank} could not exchange a call's values: {type(e).__name__}: {e}"
            reply = Message(message.number, ERROR, encode(WorkerError(text, rank=rank)))
        sys.stdout.flush()
        send(sock, reply)


def _read(sock: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    """The socket is the lifeline: its end, without EXIT before it, is the end of the parent."""
    try:
        while True:
            message = receive(sock)
            inbox.put(message)
            if message.kind == EXIT:
                return
    except (OSError, EOFError):
        _die()


def _watch_parent(parent: int) -> None:
    # A process that the parent forked may keep its end of the socket open after the parent is gone.
    while os.getppid() == parent:
        time.sleep(1.0)
    _die()


def _die() -> None:
    """End this process and those it started, at once: nobody is left to hear a farewell."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
