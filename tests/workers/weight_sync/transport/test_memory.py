"""A sync takes the memory that docs/weight_sync.md says: buckets, not a second copy of the weights."""

from pathlib import Path

import pytest

from podium.workers.weight_sync.transport.base import SyncSettings
from tests.models.tiny import save_tiny
from tests.workers.weight_sync.transport.memory import growth

BUCKET_BYTES = 1 << 20
ROOM = 8 << 20
"""For what Python and the allocator take meanwhile."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("qwen2", tmp_path_factory.mktemp("wide"), hidden_size=512, intermediate_size=8192)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["colocated", "ipc", "broadcast"])
def test_the_peak_is_a_few_buckets(path: str, transport: str, dtype: str):
    """Two for the pair of processes and one to verify; bfloat16 has them packed, where float32 travels as it lies."""
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    assert weights > 4 * (3 * BUCKET_BYTES + ROOM)
    for name, grown in growth(transport, path, dtype, SyncSettings("full", BUCKET_BYTES, 60.0)).items():
        assert grown < 3 * BUCKET_BYTES + ROOM, name
