"""Weight-sync transports and a user's own weight buffer, from the configuration to the ledger."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from podium.trainer.config import PPOConfig, check_config, load_config
from podium.trainer.main_ppo import train
from podium.utils.errors import UserError
from tests.e2e.commands import PPO, metrics, run
from tests.e2e.test_ppo import computed
from tests.small_task import SmallTask

BUFFER = '''
"""Versions as files in a folder, such as one on a disk that several machines mount."""

import contextlib
import json
import time
from pathlib import Path

import torch

from podium.workers.weight_sync.snapshot import Snapshot, SnapshotError
from podium.workers.weight_sync.weight_buffer import WeightBuffer, register_weight_buffer

FOLDER = Path(__file__).parent


@register_weight_buffer("folder")
class Folder(WeightBuffer):
    @contextlib.contextmanager
    def writing(self, version, timeout_s):
        snapshot = Snapshot(version, torch.empty(self.nbytes, dtype=torch.uint8))
        yield snapshot
        beside = FOLDER / f"{self.name}.tmp"
        torch.save((version, snapshot.memory, snapshot.notes), beside)
        beside.replace(FOLDER / f"{self.name}-{version}.pt")

    @contextlib.contextmanager
    def acquire(self, version, timeout_s):
        until = time.monotonic() + timeout_s
        while not (file := FOLDER / f"{self.name}-{version}.pt").exists():
            if time.monotonic() > until:
                raise SnapshotError(f"there is no {file}")
            time.sleep(0.01)
        yield Snapshot(*torch.load(file))
'''
SYNC = "actor_rollout_ref__rollout__weight_sync__"


def arguments(task: SmallTask, run_dir: Path, **changes: Any) -> list[str]:
    keys = {"data__val_files": None, "trainer__val_before_train": "false", "trainer__logger": "[]"}
    return task.ppo(run_dir, **(keys | changes))


def trained(task: SmallTask, run_dir: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics and ledger of a run on one rank, in this process."""
    config, explicit = load_config(PPOConfig, arguments(task, run_dir, **changes))
    check_config(config, explicit)
    train(config)
    return metrics(run_dir), ledger(run_dir)


def ledger(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "weight_sync.jsonl").read_text().splitlines()]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "buffers" / "folder.py"
    file.parent.mkdir()
    file.write_text(BUFFER)
    return file


def test_a_users_own_buffer_carries_every_version(task: SmallTask, tmp_path: Path, plugin: Path):
    keys = {f"{SYNC}transport": "folder", "trainer__plugins": f"[{plugin}]"}
    _, rows = trained(task, tmp_path / "run", **keys)
    assert [(row["version"], row["transport"]) for row in rows] == [(v, "folder") for v in range(4)]
    assert all(row["verified_buckets"] == row["buckets"] > 0 for row in rows)
    assert len(list(plugin.parent.glob("*.pt"))) == 4


def test_a_name_that_nothing_registers_is_refused(task: SmallTask, tmp_path: Path):
    with pytest.raises(UserError, match=r"transport=no_such_buffer: expected one of auto, colocated, .*cpu"):
        trained(task, tmp_path / "run", **{f"{SYNC}transport": "no_such_buffer"})


def test_weights_are_synced_every_so_many_steps_and_at_the_end(task: SmallTask, tmp_path: Path):
    keys = {f"{SYNC}transport": "cpu", f"{SYNC}frequency": 2, "trainer__total_training_steps": 5}
    steps, rows = trained(task, tmp_path / "run", **keys)
    assert [(row["step"], row["version"]) for row in rows] == [(0, 0), (2, 1), (4, 2), (5, 3)]
    assert [step["training/weight_age"] for step in steps] == [0, 1, 0, 1, 0]
    gap = "rollout_log_probs_diff_max"
    for step in steps:  # old weights are no longer a matter of numerics
        if step["training/weight_age"]:
            assert step[f"training/stale_{gap}"] > 1e-2 and f"training/{gap}" not in step
        else:
            assert step[f"training/{gap}"] < 1e-4


def test_a_rollout_that_sleeps_in_between_answers_the_same(task: SmallTask, tmp_path: Path):
    """Weights are given back where a sync brings new ones before the next response, and kept where none does."""
    keys = {f"{SYNC}frequency": 2, "trainer__total_training_steps": 4}
    sleeps = {**keys, "actor_rollout_ref__rollout__free_cache_engine": "true"}
    awake, rested = (trained(task, tmp_path / name, **keys)[0] for name, keys in (("awake", keys), ("rested", sleeps)))
    freed = [step.pop("perf/rollout_freed_gb") for step in rested]
    assert freed[1] == freed[3] > 0 == freed[0] == freed[2], "plain transformers keep no cache"
    assert [computed(step) for step in rested] == [computed(step) for step in awake]


@pytest.fixture(scope="module")
def four_layers(task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task's tokenizer with an untrained model of four layers, for two virtual stages on each of two ranks."""
    path = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(task.model, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "layer_types": None}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "pp2vpp2"])
def test_the_stages_of_a_pipeline_arrive_by_either_way(task: SmallTask, four_layers: Path, tmp_path: Path, layout: str):
    """A Megatron actor's flat memory as a whole, and what each rank lacks: the same bits, so the same run."""
    megatron = "actor_rollout_ref__actor__megatron__"
    changes = {
        "actor_rollout_ref__actor__strategy": "megatron",
        "critic__strategy": "megatron",
        "actor_rollout_ref__model__path": four_layers,
        "trainer__n_gpus_per_node": 2,
        f"{megatron}pipeline_model_parallel_size": 2,
        **({f"{megatron}virtual_pipeline_model_parallel_size": 2} if "vpp" in layout else {}),
    }
    results = {}
    for transport in ("auto", "memory_buffer"):
        done = run(PPO, arguments(task, tmp_path / transport, **changes, **{f"{SYNC}transport": transport}))
        assert done.code == 0 and not done.left, done
        results[transport] = [computed(step) for step in metrics(tmp_path / transport)]
        rows = ledger(tmp_path / transport)
        assert [row["version"] for row in rows] == [0, 1, 2, 3]
        for row in rows:
            assert row["transport"] == {"auto": "colocated"}.get(transport, transport) and row["messages"] == 1
            assert row["verified_buckets"] == row["buckets"] > 0 < row["share_of_bound"]
            assert row["bytes_sent"] > 0 and (row["bytes_received"] == 0) == (transport == "memory_buffer")
    for own, other in zip(results["memory_buffer"], results["auto"], strict=True):
        assert {**own, "weight_sync/verified_buckets": 0} == {**other, "weight_sync/verified_buckets": 0}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cpu", "sharded", "folder"])
def test_two_ranks_learn_the_same_by_any_transport(task: SmallTask, tmp_path: Path, plugin: Path, transport: str):
    """Plug-ins are loaded in the workers' processes too."""
    changes = {"trainer__n_gpus_per_node": 2, "trainer__plugins": f"[{plugin}]"}
    results = {}
    for name in ("colocated", transport):
        done = run(PPO, arguments(task, tmp_path / name, **changes, **{f"{SYNC}transport": name}))
        assert done.code == 0 and not done.left, done
        assert f"weight sync by transport {name}" in done.out
        results[name] = [(step["critic/score/mean"], step["actor/pg_loss"]) for step in metrics(tmp_path / name)]
    assert results[transport] == results["colocated"]
