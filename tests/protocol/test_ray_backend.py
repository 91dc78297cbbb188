"""What only the ray backend does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podium.protocol import (
    ClassWithInitArgs,
    ResourcePool,
    ResourcePoolManager,
    make_backend,
    merge_resource_pool,
    split_resource_pool,
)
from podium.utils.errors import UserError
from tests.protocol.conftest import ENV
from tests.protocol.workers import Echo

ROOT = Path(__file__).parents[2]


def test_too_large_a_pool_is_refused_at_once(ray_backend):
    start = time.monotonic()
    with pytest.raises(
        UserError, match=r"'big' needs 3 bundles of 4 CPUs on 1 node\(s\), the cluster has .* of 8 CPUs"
    ):
        ray_backend.start_group(ResourcePool([3], cpus_per_rank=4, name="big"), ClassWithInitArgs(Echo))
    with pytest.raises(UserError, match=r"on 2 node\(s\)"):
        ray_backend.start_group(ResourcePool([1, 1], cpus_per_rank=1), ClassWithInitArgs(Echo))
    with pytest.raises(UserError, match="GPU"):
        ray_backend.start_group(ResourcePool([64], cpus_per_rank=0, use_gpu=True), ClassWithInitArgs(Echo))
    assert time.monotonic() - start < 5


def test_a_busy_cluster_is_waited_for_with_a_deadline(ray_backend):
    pool = ResourcePool([1], cpus_per_rank=4)
    group = ray_backend.start_group(pool, ClassWithInitArgs(Echo), env=ENV)
    with pytest.raises(UserError, match="after waiting 2 s"):
        ray_backend.start_group(ResourcePool([1], cpus_per_rank=6), ClassWithInitArgs(Echo))
    with pytest.raises(UserError, match="1 are taken"):
        ray_backend.start_group(pool, ClassWithInitArgs(Echo))
    group.shutdown()
    ray_backend.start_group(ResourcePool([1], cpus_per_rank=4), ClassWithInitArgs(Echo), env=ENV).shutdown()


@pytest.mark.slow
def test_split_pools_share_one_reservation(ray_backend):
    pool = ResourcePool([2], cpus_per_rank=1, name="both")
    halves = split_resource_pool(pool, 1)
    groups = [ray_backend.start_group(p, ClassWithInitArgs(Echo), env=ENV) for p in halves]
    assert [g.world_size for g in groups] == [1, 1]
    assert len({g.whoami()[0]["pid"] for g in groups}) == 2
    for g in groups:
        g.shutdown()
    merged = merge_resource_pool(ResourcePool([1], 0.5), ResourcePool([1], 0.5))
    group = ray_backend.start_group(merged, ClassWithInitArgs(Echo), env=ENV)
    assert group.world_size == 2
    group.shutdown()


def test_pool_manager():
    manager = ResourcePoolManager({"a": [2], "b": [1]}, {"actor": "a", "ref": "a", "critic": "b"})
    assert manager.roles_by_pool() == {"a": ["actor", "ref"], "b": ["critic"]}
    assert manager.get_resource_pool("actor") is manager.get_resource_pool("ref")
    assert manager.get_resource_pool("critic").world_size == 1
    with pytest.raises(UserError, match="'rm' is mapped to no pool"):
        manager.get_resource_pool("rm")
    with pytest.raises(UserError, match="mapped to pool 'c'"):
        ResourcePoolManager({"a": [1]}, {"actor": "c"})
    with pytest.raises(UserError, match="into"):
        ResourcePool([2]).split([1])
    with pytest.raises(UserError, match="process_on_nodes"):
        ResourcePool([])


def test_backends_are_named():
    with pytest.raises(UserError, match="'local' or 'ray'"):
        make_backend("slurm")
    with pytest.raises(UserError, match="unexpected keyword"):
        make_backend("local", num_cpus=3)
    with pytest.raises(UserError, match="no detached"):
        make_backend("local").attach_group("x")


def test_local_backend_needs_no_ray():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from podium.protocol import *\n"
        "make_backend('local').shutdown()\n"
        "try: make_backend('ray')\n"
        "except ValueError as e: print(e)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert "the ray backend needs the package ray" in out.stdout


SECOND_DRIVER = """
import sys
from podium.protocol import make_backend
with make_backend("ray") as backend:
    group = backend.attach_group("keeper", timeout_s=60)
    print("found", group.world_size, [s["tag"] for s in group.whoami()], flush=True)
    if sys.argv[1] == "end":
        group.shutdown()
    try:
        backend.attach_group("nobody")
    except ValueError as e:
        print(e, flush=True)
"""


def test_detached_group_is_found_by_a_second_driver(ray_backend):
    import ray

    group = ray_backend.start_group(
        ResourcePool([2], cpus_per_rank=0.5), ClassWithInitArgs(Echo, "kept"), env=ENV, name="keeper", detached=True
    )
    pids = [s["pid"] for s in group.whoami()]
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    for what in ("look", "end"):
        out = subprocess.run(
            [sys.executable, "-c", SECOND_DRIVER, what], env=env, capture_output=True, text=True, timeout=90
        )
        assert "found 2 ['kept', 'kept']" in out.stdout and "no detached group named 'nobody'" in out.stdout, out
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{p}") for p in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{p}") for p in pids)


TWO_NODES = """
import os
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
from podium.protocol import *
from tests.protocol.workers import Distributed, Echo
with make_backend("ray", address=cluster.address) as backend:
    env = {"OMP_NUM_THREADS": "1"}
    group = backend.start_group(ResourcePool([2, 2], cpus_per_rank=1), ClassWithInitArgs(Distributed), env=env)
    import ray
    nodes = group._transport._wheres
    print("nodes", len({w.node for w in nodes}), "ranks by node", [nodes[r].node == nodes[0].node for r in range(4)])
    print("local ranks", group.node())
    print("sum over both nodes", group.total(1))
    try:
        backend.start_group(ResourcePool([3], cpus_per_rank=1, name="wide"), ClassWithInitArgs(Echo))
    except ValueError as e:
        print(e)
cluster.shutdown()
print("done", flush=True)
"""


def test_two_nodes():
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    out = subprocess.run([sys.executable, "-c", TWO_NODES], env=env, capture_output=True, text=True, timeout=150)
    assert "nodes 2 ranks by node [True, True, False, False]" in out.stdout, out.stdout + out.stderr
    assert "local ranks [(0, 2), (1, 2), (0, 2), (1, 2)]" in out.stdout
    assert "sum over both nodes [10.0, 10.0, 10.0, 10.0]" in out.stdout
    assert "'wide' needs 3 bundles of 1 CPUs" in out.stdout and "done" in out.stdout
