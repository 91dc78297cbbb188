"""Tiny model directories, and groups that are started once: processes are what takes time."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from podium.protocol import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup, make_backend
from podium.utils.device import init_distributed
from tests.models.tiny import ARCHITECTURES, save_tiny
from tests.workers.engine.hosts import EngineHost

ENV = {
    "OMP_NUM_THREADS": "1",
    "PODIUM_DEVICE": "cpu",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}

MAX_NUM_SEQS = 16


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One directory an architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(name, root / name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def local_backend() -> Iterator[Backend]:
    with make_backend("local") as backend:
        yield backend


@pytest.fixture(scope="session")
def one(local_backend: Backend) -> WorkerGroup:
    """An engine on one rank, in this process."""
    return local_backend.start_group(ResourcePool([1]), ClassWithInitArgs(EngineHost), env=ENV)


@pytest.fixture(scope="session")
def two(local_backend: Backend) -> WorkerGroup:
    """An engine on two ranks, in processes of their own."""
    return local_backend.start_group(ResourcePool([2]), ClassWithInitArgs(EngineHost), env=ENV, timeout_s=60)


@pytest.fixture(params=["one", "two"])
def group(request: pytest.FixtureRequest) -> WorkerGroup:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def vllm_engines(model_dirs: dict[str, str]) -> Iterator["VLLMEngines"]:
    """vLLM engines by architecture and dtype; each starts once, on first use."""
    engines = VLLMEngines(model_dirs)
    yield engines
    engines.shutdown()


class VLLMEngines:
    """Starts vLLM engines on demand and keeps them."""

    def __init__(self, model_dirs: dict[str, str]):
        self._model_dirs, self._engines = model_dirs, {}
        self.moved: list[str] = []
        """Global state that starting an engine moved."""

    def __call__(self, name: str, dtype: str = "float32"):
        if (name, dtype) not in self._engines:
            from podium.workers.rollout.vllm import VLLMRollout

            init_distributed()
            before = global_state()
            with pytest.MonkeyPatch.context() as patch:
                for variable in ("RANK", "LOCAL_RANK"):  # as in a worker's process
                    patch.setenv(variable, "0")
                self._engines[name, dtype] = VLLMRollout(
                    self._model_dirs[name], dtype=dtype, max_model_len=320, max_num_seqs=MAX_NUM_SEQS
                )
            after = global_state()
            self.moved += [key for key in before if before[key] != after[key]]
        return self._engines[name, dtype]

    def shutdown(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()


def global_state() -> dict[str, object]:
    """What a library that shares the process must leave alone."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "random": random.getstate(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
    }
