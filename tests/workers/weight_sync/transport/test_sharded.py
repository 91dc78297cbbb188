"""Weights in shares: each byte sent once, and put together from what the others hold."""

import pytest

from tests.workers.weight_sync.transport.stage import Stage


@pytest.mark.parametrize(
    ("sources", "destinations", "colocated", "dtype"),
    [(2, 3, False, "float32"), (3, 3, True, "bfloat16")],
)
def test_every_version_arrives_bit_for_bit(model_dirs, sources: int, destinations: int, colocated: bool, dtype: str):
    stage = Stage(model_dirs["qwen2"], sources, destinations, colocated=colocated, dtype=dtype)
    try:
        stage.connect("sharded")
        for version in (0, 1, 5):
            stage.synced(version)
    finally:
        stage.close()
