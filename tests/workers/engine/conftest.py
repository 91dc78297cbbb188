"""What the tests of the Megatron engine share."""

from collections.abc import Iterator

import pytest

from podium.protocol import Backend
from tests.models.tiny import ARCHITECTURES, EXPERTS, ragged_batch, save_tiny
from tests.workers.engine.megatron_cases import LAYERS, Start, hosts
from tests.workers.engine.plain import Batch


@pytest.fixture(scope="module")
def start(local_backend: Backend) -> Iterator[Start]:
    with hosts(local_backend) as start:
        yield start


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of 4 layers, which pp=2 with vpp=2 divides."""
    root = tmp_path_factory.mktemp("deep")
    return {name: save_tiny(name, root / name, num_hidden_layers=LAYERS) for name in ARCHITECTURES + EXPERTS}


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return [ragged_batch(8, seed=seed) for seed in range(3)]
