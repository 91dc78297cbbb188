"""The algorithms are pure functions of tensors: importing them brings in no engine."""

import subprocess
import sys
from pathlib import Path

import pytest

from podium.trainer.ppo.registry import Registry
from podium.utils.errors import UserError

ROOT = Path(__file__).parents[3]
MODULES = ["advantages", "losses", "kl", "rollout_correction", "rewards", "sampling", "scan", "registry", "aggregation"]


def test_the_algorithms_import_neither_ray_nor_vllm_nor_transformers():
    code = f"""
import importlib, sys
for name in {MODULES}:
    importlib.import_module("podium.trainer.ppo." + name)
heavy = [m for m in ("ray", "vllm", "transformers", "tensordict", "hydra") if m in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_registry_refuses_what_it_does_not_know_and_what_it_has():
    registry = Registry("thing")
    function = registry.register("alpha")(lambda: 1)
    registry.register("alpha")(function)  # a reloaded module
    assert registry.get("alpha") is function and registry.names() == ["alpha"]
    with pytest.raises(UserError, match=r"unknown thing 'alfa'; did you mean 'alpha'\? known: alpha"):
        registry.get("alfa")
    with pytest.raises(UserError, match="already registered"):
        registry.register("alpha")(max)


def test_their_tests_need_no_engine_either():
    """This folder has the tests of the pure functions; those of the loop around them are in ``ppo_loop``."""
    code = """
import pytest, sys
assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/trainer/ppo"]) == 0
heavy = [m for m in ("ray", "vllm", "transformers") if m in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
