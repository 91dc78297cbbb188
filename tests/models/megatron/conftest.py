"""Ranks that are started once and take one layout after another: imports are what takes time."""

from collections.abc import Callable, Iterator

import pytest

from podium.protocol import ClassWithInitArgs, ResourcePool, WorkerGroup, make_backend

ENV = {
    "OMP_NUM_THREADS": "1",
    "PODIUM_DEVICE": "cpu",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}
Ranks = Callable[[int], WorkerGroup]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Groups of `ModelHost`, by their number of ranks, each started on first use."""
    pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")
    from tests.models.megatron.hosts import ModelHost

    groups: dict[int, WorkerGroup] = {}
    with make_backend("local") as backend:

        def start(number: int) -> WorkerGroup:
            if number not in groups:
                groups[number] = backend.start_group(
                    ResourcePool([number]), ClassWithInitArgs(ModelHost), env=ENV, timeout_s=120
                )
            return groups[number]

        yield start
