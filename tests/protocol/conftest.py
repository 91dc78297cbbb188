"""One Ray, and one group of two ranks a backend, for the whole folder: starting them is what takes time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from podium.protocol import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup, make_backend
from tests.protocol.workers import Echo

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
def pair(backend: Backend) -> Iterator[WorkerGroup]:
    """Two ranks."""
    pool = ResourcePool([2], cpus_per_rank=0.5)
    group = backend.start_group(pool, ClassWithInitArgs(Echo, "two"), env=ENV, name="echo")
    yield group
    group.shutdown()


@pytest.fixture(scope="session")
def single(backend: Backend) -> Iterator[WorkerGroup]:
    """One rank: in this process on the local backend."""
    group = backend.start_group(ResourcePool([1], cpus_per_rank=0.5), ClassWithInitArgs(Echo, tag="one"), name="echo")
    yield group
    group.shutdown()


@pytest.fixture(params=["single", "pair"])
def group(request: pytest.FixtureRequest, backend: Backend) -> WorkerGroup:
    return request.getfixturevalue(request.param)
