"""A world of several ranks on this machine listens on no other interface."""

import ipaddress
import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from podium.protocol.backend import free_port
from podium.utils.device import init_distributed, tcp_store


def _rank(rank: int, port: int, meeting: int, answers: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    init_distributed()
    store = tcp_store("127.0.0.1", meeting, rank == 0, timedelta(seconds=60))
    store.set(f"rank {rank}", "here")
    store.wait([f"rank {1 - rank}"])
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=torch.distributed.new_group(backend="gloo"))
    listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    answers.put((total.item(), listening))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_only_loopback_is_listened_on():
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    ports = free_port(), free_port()
    ranks = [context.Process(target=_rank, args=(rank, *ports, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    results = [answers.get(timeout=100) for _ in ranks]
    for rank in ranks:
        rank.join(20)
    assert [total for total, _ in results] == [2, 2]
    heard = [ip for _, addresses in results for ip in addresses]
    assert heard and Path("/sys/class/net/lo").exists()
    assert all(ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback for ip in heard), heard
