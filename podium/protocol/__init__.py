"""What crosses between driver and workers: batches, dispatch, worker groups and the backends that run them."""

from podium.protocol.backend import Backend, make_backend
from podium.protocol.colocate import create_colocated_worker_cls
from podium.protocol.data import DataProto, DataProtoItem
from podium.protocol.data_ops import (
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from podium.protocol.dispatch import (
    Broadcast,
    Dispatch,
    Execute,
    PerRank,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_dispatch_fn,
    register,
    register_dispatch_mode,
)
from podium.protocol.errors import WorkerDied, WorkerError, WorkerTimeout
from podium.protocol.future import DataProtoFuture, Future
from podium.protocol.group import ClassWithInitArgs, WorkerGroup
from podium.protocol.resource import (
    ResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from podium.protocol.sharding import DISPATCH_VALID
from podium.protocol.verl_names import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from podium.protocol.worker import Worker

__all__ = [
    "DISPATCH_VALID",
    "Backend",
    "Broadcast",
    "ClassWithInitArgs",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Execute",
    "Future",
    "PerRank",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeout",
    "all_gather_data_proto",
    "collate_fn",
    "create_colocated_worker_cls",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "make_backend",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_nd_compute_dispatch_fn",
    "merge_resource_pool",
    "pad_dataproto_to_divisor",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
