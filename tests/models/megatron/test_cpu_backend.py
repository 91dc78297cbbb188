"""The replacements in megatron-core: they must still find what they replace, and reach nothing else."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from podium.models.megatron import cpu_backend
from podium.models.megatron.cpu_backend import ON_CPU, TRIED, WITHOUT_APEX, Replacement
from podium.utils.errors import UserError
from tests.models.megatron.conftest import Ranks

core = pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")
EVERY = [*ON_CPU, *WITHOUT_APEX]


def test_this_version_of_megatron_core_was_tried():
    assert core.__version__ in TRIED, (
        f"megatron-core {core.__version__}: run the slow tests of tests/models/megatron and "
        "tests/workers/engine with it, then name it in cpu_backend.TRIED"
    )


@pytest.mark.parametrize("replacement", EVERY, ids=[f"{each.module}.{each.name}" for each in EVERY])
def test_what_is_replaced_is_still_there(replacement: Replacement):
    owner, attribute = replacement.owner()
    assert callable(getattr(owner, attribute))


def in_a_new_process(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PODIUM_DEVICE": "cpu", **env, **_path()}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_only_megatron_core_sees_another_torch():
    code = """
import torch
from podium.models.megatron import cpu_backend
cpu_backend.install()
cpu_backend.install()
from megatron.core.tensor_parallel import layers
from megatron.core.pipeline_parallel import schedules
assert layers.torch is not torch and schedules.torch is layers.torch
assert layers.torch.cuda.current_device() == torch.device("cpu")
assert layers.torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
assert layers.torch.nn is torch.nn and layers.torch.float32 is torch.float32
assert torch.cuda.current_device is not layers.torch.cuda.current_device
assert torch.ones(1).type() == "torch.FloatTensor"
with cpu_backend._cuda_type_names():
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type(torch.int8).dtype == torch.int8
assert torch.ones(1).type() == "torch.FloatTensor"
print("fine")
"""
    assert in_a_new_process(code) == "fine"


def test_every_name_of_torch_in_the_modules_that_run_is_replaced(ranks: Ranks):
    """What megatron-core imports later would keep the real torch: all that models and engines use is there before."""
    assert ranks(2).holders_of_the_real_torch() == [[], []]


@pytest.mark.slow
def test_with_cuda_megatron_core_keeps_the_real_torch():
    code = """
import torch
from podium.models.megatron import cpu_backend
cpu_backend.is_cuda = lambda: True
cuda = torch.Tensor.cuda
cpu_backend.install()
from megatron.core.tensor_parallel import layers
assert layers.torch is torch and torch.Tensor.cuda is cuda
print("fine")
"""
    assert in_a_new_process(code) == "fine"


def test_without_megatron_core_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(cpu_backend._state, "installed", False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"strategy=megatron needs megatron-core: pip install 'podium\[megatron\]'"):
        cpu_backend.install()


def test_split_sizes_become_what_all_to_all_takes():
    convert = cpu_backend._numpy_or_same
    assert convert(torch.tensor([1, 2]), as_numpy=True).tolist() == [1, 2]
    assert not torch.is_tensor(convert(torch.tensor([1, 2]), as_numpy=True))
    same = SimpleNamespace()
    assert convert(same, as_numpy=True) is same
