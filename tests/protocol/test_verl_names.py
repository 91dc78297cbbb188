"""Code written for verl's worker groups, with nothing changed but where the names are imported from."""

from __future__ import annotations

import os

import pytest
import torch

from podium.protocol import (
    DataProto,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    merge_resource_pool,
    register,
)
from podium.utils.errors import UserError


class Scorer(Worker):
    def __init__(self, scale, offset=0):
        super().__init__()
        self.scale, self.offset = scale, offset

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.ready = True

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute(self, data: DataProto):
        return DataProto.from_dict(tensors={"y": data.batch["x"] * self.scale + self.offset})

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def where(self, value):
        return self.rank, value, os.getpid()


def _batch(rows):
    return DataProto.from_dict(tensors={"x": torch.arange(rows)})


def test_a_group_of_one_role(ray_backend):
    import ray

    resource_pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    class_with_args = RayClassWithInitArgs(cls=ray.remote(Scorer), scale=2, offset=1)
    worker_group = RayWorkerGroup(resource_pool, class_with_args, name_prefix="scorer")
    assert isinstance(worker_group, RayWorkerGroup) and worker_group.world_size == 2
    worker_group.init_model()
    assert worker_group.compute(_batch(3)).batch["y"].tolist() == [1, 3, 5]
    assert [said[:2] for said in worker_group.where(["a", "b"])] == [(0, "a"), (1, "b")]
    assert [said[1] for said in worker_group.execute_all_sync("where", 7)] == [7, 7]
    assert worker_group.execute_rank_zero_sync("where", 7)[0] == 0
    with pytest.raises(UserError, match="create_colocated_worker_cls"):
        worker_group.spawn(prefix_set=["actor"])
    worker_group.shutdown()


def test_colocated_roles_are_spawned(ray_backend):
    import ray

    resource_pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, name_prefix="global", max_colocate_count=1)
    class_dict = {
        "actor": RayClassWithInitArgs(cls=ray.remote(Scorer), scale=10),
        "critic": RayClassWithInitArgs(Scorer, 100),
    }
    worker_dict_cls = create_colocated_worker_cls(class_dict=class_dict)
    wg_dict = RayWorkerGroup(resource_pool=resource_pool, ray_cls_with_init=worker_dict_cls, device_name="cpu")
    spawn_wg = wg_dict.spawn(prefix_set=class_dict.keys())
    actor, critic = spawn_wg["actor"], spawn_wg["critic"]
    actor.init_model()
    assert actor.compute(_batch(2)).batch["y"].tolist() == [0, 10]
    assert critic.compute(_batch(2)).batch["y"].tolist() == [0, 100]
    assert wg_dict.actor_compute(_batch(2)).batch["y"].tolist() == [0, 10]
    assert [said[2] for said in actor.where([0, 0])] == [said[2] for said in critic.where([0, 0])]
    wg_dict.shutdown()


def test_a_detached_group_is_found_by_its_worker_names(ray_backend):
    pools = [RayResourcePool([1], use_gpu=False, max_colocate_count=1) for _ in range(2)]
    pool = merge_resource_pool(*pools)
    assert pool.world_size == 2
    first = RayWorkerGroup(pools[0], RayClassWithInitArgs(Scorer, 3), name_prefix="verl_names", detached=True)
    found = RayWorkerGroup.from_detached(
        worker_names=first.worker_names, ray_cls_with_init=RayClassWithInitArgs(Scorer, 3)
    )
    assert found.compute(_batch(2)).batch["y"].tolist() == [0, 3]
    found.shutdown()
    with pytest.raises(UserError, match="name_prefix"):
        RayWorkerGroup.from_detached()
