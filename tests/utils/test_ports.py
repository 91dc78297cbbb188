"""A port that is held is nobody else's, until a store listens on it."""

import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from podium.utils.device import tcp_store
from podium.utils.ports import inherit_port, lend_port, release_port, reserve_port, take_listener


def bind(port: int) -> None:
    """Only to see whether it can be had."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", port))


def test_nobody_else_gets_a_port_that_is_held():
    port = reserve_port("127.0.0.1", "a test")
    with pytest.raises(OSError, match="in use"):
        bind(port)
    store = tcp_store("127.0.0.1", port, True, timedelta(seconds=10))
    with pytest.raises(OSError, match="in use"):
        bind(port)
    tcp_store("127.0.0.1", port, False, timedelta(seconds=10)).set("key", "value")
    assert store.get("key") == b"value" and take_listener(port) is None


def test_torch_can_still_listen_on_it_by_itself():
    port = reserve_port("127.0.0.1", "a test")
    store = torch.distributed.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=10))
    store.set("key", "value")
    release_port("a test")
    assert store.get("key") == b"value"


def test_a_purpose_has_one_port():
    first = reserve_port("127.0.0.1", "a test")
    second = reserve_port("127.0.0.1", "a test")
    bind(first)
    release_port("a test")
    bind(second)


def test_a_child_has_the_port_of_its_parent():
    port = reserve_port("127.0.0.1", "a test")
    lent = lend_port("a test")
    program = f"from {inherit_port.__module__} import *; inherit_port({lent}, 'x'); take_listener({port})"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{program}; print('ready', flush=True); input()"],
        pass_fds=[lent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    release_port("a test")
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    with pytest.raises(OSError, match="in use"):
        bind(port)
    child.communicate("\n", timeout=20)
    bind(port)
