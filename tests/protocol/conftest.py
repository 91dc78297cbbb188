"""One Ray, and one group of four ranks a backend, for the whole folder: starting them is what takes time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from podium.protocol import (
    Backend,
    ClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
    make_backend,
)
from tests.protocol.workers import Distributed, Echo, Mesh

ENV = {"OMP_NUM_THREADS": "1", "PODIUM_TEST_ENV": "set"}


@pytest.fixture(scope="session")
def local_backend() -> Iterator[Backend]:
    with make_backend("local") as backend:
        yield backend


@pytest.fixture(scope="session")
def ray_backend() -> Iterator[Backend]:
    with make_backend("ray", num_cpus=8, placement_timeout_s=2.0) as backend:
        yield backend


@pytest.fixture(scope="session", params=["local", "ray"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(f"{request.param}_backend")


@pytest.fixture(scope="session")
def four(backend: Backend) -> Iterator[dict[str, WorkerGroup]]:
    """Four ranks, each with every kind of role."""
    roles = {
        "echo": ClassWithInitArgs(Echo, "e"),
        "critic": ClassWithInitArgs(Echo, tag="c"),
        "dist": ClassWithInitArgs(Distributed),
        "mesh": ClassWithInitArgs(Mesh),
    }
    pool = ResourcePool([4], cpus_per_rank=0.5)
    group = backend.start_group(pool, create_colocated_worker_cls(roles), env=ENV)
    yield {"whole": group, **group.spawn(roles)}
    group.shutdown()


@pytest.fixture(scope="session")
def many(four: dict[str, WorkerGroup]) -> WorkerGroup:
    """Four ranks of Echo."""
    return four["echo"]


@pytest.fixture(scope="session")
def single(backend: Backend) -> Iterator[WorkerGroup]:
    """One rank of Echo: in this process on the local backend."""
    group = backend.start_group(ResourcePool([1], cpus_per_rank=0.5), ClassWithInitArgs(Echo, tag="e"), name="echo")
    yield group
    group.shutdown()


@pytest.fixture(params=["single", "many"])
def group(request: pytest.FixtureRequest, backend: Backend) -> WorkerGroup:
    return request.getfixturevalue(request.param)
