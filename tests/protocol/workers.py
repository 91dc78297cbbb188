"""Workers that the tests of groups start. A module of its own, because processes import it."""

from __future__ import annotations

import os
import time

import torch

from podium.protocol import DataProto, DataProtoFuture, Dispatch, Execute, Worker, register
from podium.protocol.dispatch import make_nd_compute_dataproto_dispatch_fn, make_nd_compute_dispatch_fn
from podium.utils.errors import UserError

ENV_AT_IMPORT = os.environ.get("PODIUM_TEST_ENV")


class Echo(Worker):
    """Says what it was sent."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag

    @register(Dispatch.ONE_TO_ALL)
    def whoami(self) -> dict:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return {
            "rank": (self.rank, self.world_size, self.local_rank, self.local_world_size),
            "env": {n: os.environ[n] for n in names},
            "at_import": ENV_AT_IMPORT,
            "now": os.environ.get("PODIUM_TEST_ENV"),
            "pid": os.getpid(),
            "tag": self.tag,
        }

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, value, other=None):
        return self.rank, value, other

    @register(Dispatch.ALL_TO_ALL)
    def all_to_all(self, value):
        return self.rank, value

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, value):
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self):
        return self.rank

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, values, data):
        return self.rank, values, len(data)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto):
        return len(data)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto, scale=2, names=None) -> DataProto:
        valid = data.batch["dispatch_valid"] if "dispatch_valid" in data._tensors() else torch.ones(len(data)).bool()
        out = DataProto.from_dict({"y": data.batch["x"] * scale}, {"who": [self.rank] * len(data)})
        out.meta_info["metrics"] = {"rows": int(valid.sum()), "sent": len(data), "names": names}
        data.batch["x"].zero_()  # nobody else may see this
        return out

    @register(Dispatch.DP_COMPUTE_PROTO)
    def carry(self, data: DataProto) -> DataProto:
        return data.repeat(2, interleave=False)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, data: DataProto) -> DataProto:
        time.sleep(0.2)
        return DataProto.from_dict({"x": data.batch["x"] * 2})

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def later(self):
        time.sleep(0.2)
        return self.rank

    @register(Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def lazy(self, data) -> DataProto:
        assert isinstance(data, DataProtoFuture)
        return data.get()

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, fn, data: DataProto) -> DataProto:
        return fn(data)

    @register(Dispatch.ONE_TO_ALL)
    def broadcast_batch(self, data: DataProto):
        data.batch["x"].add_(self.rank + 1)
        return data.batch["x"].sum().item()

    @register(Dispatch.ONE_TO_ALL)
    async def awaited(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def sibling(self, role):
        peer = self.peer(role)
        return None if peer is None else (peer.tag, peer.rank, peer is self)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank, kind="value"):
        if self.rank != rank:
            time.sleep(3)
            return
        if kind == "user":
            raise UserError("data.train_files: no such file")
        if kind == "unpicklable":
            raise _Unpicklable(lambda: None, 3)
        raise KeyError("missing")

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, rank, seconds):
        if self.rank == rank:
            time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def exit(self, rank, code):
        if self.rank == rank:
            os._exit(code)

    @register(Dispatch.ONE_TO_ALL)
    def say(self, text):
        print(text, flush=True)


class _Unpicklable(Exception):
    def __init__(self, fn, n):
        super().__init__(f"cannot travel {n}")
        self.fn = fn


class Distributed(Worker):
    """Ranks that form a torch.distributed group themselves."""

    def __init__(self) -> None:
        torch.distributed.init_process_group("gloo")

    @register(Dispatch.ONE_TO_ALL)
    def node(self):
        return self.local_rank, self.local_world_size

    @register(Dispatch.ONE_TO_ALL)
    def total(self, value):
        t = torch.tensor([float(value + self.rank)])
        torch.distributed.all_reduce(t)
        return t.item()

    @register(Dispatch.ONE_TO_ALL)
    def die_in_collective(self, rank):
        if self.rank == rank:
            print("about to die", flush=True)
            os.kill(os.getpid(), 9)
        torch.distributed.all_reduce(torch.zeros(1))

    @register(Dispatch.DP_COMPUTE_METRIC)
    def gather(self, data: DataProto):
        from podium.protocol import all_gather_data_proto

        all_gather_data_proto(data, torch.distributed.group.WORLD)
        return data.batch["x"].tolist()


class Mesh(Worker):
    """Four ranks as tp 2 x pp 1 x dp 2 (rank = dp * 2 + tp), and as tp 1 x pp 2 x dp 2."""

    def __init__(self) -> None:
        self.register_mesh("tp2", self.rank // 2, self.rank % 2 == 0)
        self.register_megatron_mesh(dp_rank=self.rank // 2, pp_rank=self.rank % 2, pp_size=2)

    @register(make_nd_compute_dataproto_dispatch_fn("tp2"))
    def over_tp(self, data: DataProto, every) -> DataProto:
        return self._mark(data, every)

    @register(make_nd_compute_dispatch_fn("tp2"))
    def sum_over_tp(self, data: DataProto, every) -> tuple[int, float]:
        return self.rank, float(data.batch["x"].sum())

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def megatron(self, data: DataProto, every) -> DataProto:
        return self._mark(data, every)

    @register(Dispatch.MEGATRON_PP_AS_DP_PROTO, blocking=False)
    def pp_as_dp(self, data: DataProto, every) -> DataProto:
        return self._mark(data, every)

    @register(make_nd_compute_dataproto_dispatch_fn("nowhere"))
    def unplaced(self, data: DataProto) -> DataProto:
        return data

    def _mark(self, data: DataProto, every) -> DataProto:
        out = DataProto.from_dict({"x": data.batch["x"].clone(), "rank": torch.full((len(data),), self.rank)})
        data.batch["x"].zero_()
        return out.select(meta_info_keys=[])


class FailsToStart(Worker):
    def __init__(self, kind: str = "value") -> None:
        if self.rank == self.world_size - 1 and kind != "slow":
            if kind == "user":
                raise UserError("model.path: no such folder")
            raise RuntimeError("no weights")
        if self.world_size > 1:
            time.sleep(20)
