"""What rests in host memory is freed, comes back as it was, and changes nothing that an engine computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.protocol import WorkerGroup
from podium.trainer.config.shared import FSDPConfig
from podium.workers.engine.offload import Offloadable, Parked, Part, needs
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.megatron_cases import Start, build, proto, same
from tests.workers.engine.plain import Batch

OFFLOAD = {"param_offload": True, "optimizer_offload": True}
EMPTY = {"params": 0, "optimizer": 0, "grads": 0}


def test_parked_memory_is_freed_and_comes_back_under_the_same_views():
    whole = torch.arange(12, dtype=torch.bfloat16)
    view, other = whole[4:8].view(2, 2), torch.ones(3, 5)
    before = [each.clone() for each in (whole, view, other)]
    parked = Parked([view, whole, other[1:]])
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert view.shape == (2, 2), "shapes are known while the memory is away"
    parked.restore()
    same([whole, view, other], before)
    view.zero_()
    assert not whole[4:8].any()
    Parked([other], keep=False).restore()
    assert other.shape == (3, 5) and not other.any()


class Parts(Offloadable):
    """Three tensors, of which the last is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[Part, torch.Tensor] = {p: torch.ones(4) for p in ("params", "optimizer", "grads")}

    def memory(self, part: Part) -> list[torch.Tensor]:
        return [self.tensors[part]]

    def held(self) -> set[str]:
        return {part for part, tensor in self.tensors.items() if tensor.untyped_storage().nbytes()}

    @needs("params")
    def total(self) -> float:
        assert "params" in self.held()
        return float(self.tensors["params"].sum())

    @needs("params", "optimizer")
    def fail(self) -> None:
        raise ArithmeticError(self.total())


class Config:
    param_offload, optimizer_offload, grad_offload = True, True, True


def test_a_phase_has_what_it_needs_and_leaves_nothing_behind():
    parts = Parts()
    parts.rest(Config)
    assert not parts.held()
    assert parts.total() == 4.0 and not parts.held()
    with pytest.raises(ArithmeticError, match=r"4\.0"):
        parts.fail()
    assert not parts.held()
    with parts.phase("params"):
        assert parts.total() == 4.0 and parts.held() == {"params"}, "an inner phase leaves the outer one its parts"
    parts.to("device")
    assert parts.held() == {"params", "optimizer", "grads"}
    parts.to("device", ["params"])
    with parts.phase("params"):
        pass
    assert "params" in parts.held(), "it was there before the phase"


def trained(group: WorkerGroup, batches: list[Batch]) -> list[Any]:
    """Outputs, metrics and weights of two steps, on every rank."""
    results: list[Any] = []
    for batch in batches[:2]:
        results.append(dict(group.infer(proto(batch), 3).batch.items()))
        results.append(group.train(proto(batch), weighted_log_probs, 3))
    return [*results, group.weights(), group.optimizer_state()]


def offloading_changes_nothing(make: Callable[[bool], WorkerGroup], batches: list[Batch], path: Path) -> None:
    """`make` builds an engine that offloads, or one that does not."""
    expected = trained(make(False), batches)
    group = make(True)
    assert all(rank == EMPTY for rank in group.held_bytes())
    got = trained(group, batches)
    assert all(rank == EMPTY for rank in group.held_bytes())
    same(got[:-2], expected[:-2])
    same(got[-2], expected[-2])
    same(got[-1], expected[-1])
    assert all(rank > 0 for rank in group.pieces_while_away()), "a weight sync asks for them before its first phase"
    resident = group.held_in_phase("params", "optimizer")
    assert all(rank["optimizer"] > rank["params"] > 0 for rank in resident), "two moments of each"
    group.save(str(path))
    group.train(proto(batches[2]), weighted_log_probs, 3)
    after = group.weights()
    group = make(True)
    group.load(str(path))
    group.train(proto(batches[2]), weighted_log_probs, 3)
    same(group.weights(), after)
    assert all(rank == EMPTY for rank in group.held_bytes())


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_computes_the_same(group: WorkerGroup, model_dirs, batches: list[Batch], tmp_path: Path, reshard: bool):
    def make(offload: bool) -> WorkerGroup:
        config = FSDPConfig(reshard_after_forward=reshard, **(OFFLOAD if offload else {}))
        group.build(model_dirs["qwen3"], fsdp=config)
        return group

    offloading_changes_nothing(make, batches, tmp_path)


@pytest.mark.parametrize("text", ["tp2", *(pytest.param(t, marks=pytest.mark.slow) for t in ("pp2 vpp2", "dp2 bf16"))])
def test_megatron_computes_the_same(start: Start, paths, batches: list[Batch], tmp_path: Path, text: str):
    def make(offload: bool) -> WorkerGroup:
        return build(start, text + " offload" * offload, paths["llama_tied"])

    offloading_changes_nothing(make, batches, tmp_path)
