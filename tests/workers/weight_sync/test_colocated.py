"""Trained weights arrive in the rollout bit for bit, and what does not arrive is noticed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from podium.protocol import WorkerGroup
from podium.workers.rollout.base import Request, RolloutEngine, SamplingParams, StaleWeightsError
from podium.workers.rollout.hf import HFRollout
from podium.workers.weight_sync.checksum import tensor_checksum
from podium.workers.weight_sync.colocated import WeightSyncError, sync_colocated
from tests.models.tiny import ARCHITECTURES, ragged_batch, tiny_model
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.test_fsdp import proto

Build = Callable[[str], RolloutEngine]


@pytest.fixture(params=["hf", "vllm"])
def rollouts(request: pytest.FixtureRequest, model_dirs: dict[str, str]) -> Build:
    if request.param == "vllm":
        return request.getfixturevalue("vllm_engines")
    return lambda name, dtype="float32": HFRollout(model_dirs[name], dtype=dtype, max_num_seqs=8)


def trained(one: WorkerGroup, path: str, steps: int = 2) -> Any:
    """An engine whose weights are no longer those of any file."""
    one.build(path)
    for seed in range(steps):
        one.train(proto(ragged_batch(4, seed=seed)), weighted_log_probs, 4)
    return engine_of(one)


def engine_of(one: WorkerGroup) -> Any:
    return one._transport._host.context.roles["EngineHost"].engine


def held_by(rollout: RolloutEngine, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    read = rollout.read_weights({name: tensor.shape for name, tensor in sent.items()})
    return {name: tensor.detach().clone() for name, tensor in read if name in sent}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in ARCHITECTURES), ("qwen2", "bfloat16")])
def test_every_weight_arrives_bit_for_bit(rollouts: Build, one: WorkerGroup, model_dirs, name: str, dtype: str):
    rollout = rollouts(name, dtype)
    engine = trained(one, model_dirs[name])
    for _ in range(2):
        one.train(proto(ragged_batch(4, seed=9)), weighted_log_probs, 4)
        sent = {n: p.to(getattr(torch, dtype)) for n, p in one.weights()[0].items()}
        report = sync_colocated(engine, rollout, rollout.weight_version + 1, getattr(torch, dtype), "full")
        torch.testing.assert_close(held_by(rollout, sent), sent, rtol=0, atol=0)
        assert report.version == rollout.weight_version and report.transport == "colocated"
        assert report.tensors == report.verified_tensors == len(sent)
        assert report.bytes == sum(t.numel() for t in sent.values()) * getattr(torch, dtype).itemsize
        assert report.seconds > 0 and report.verify_seconds > 0
    model = tiny_model(name).to(getattr(torch, dtype))
    model.load_state_dict(sent, strict=False)
    request = Request("a", (5, 6, 7), SamplingParams(max_tokens=5, temperature=0.7, seed=1))
    output = rollout.generate([request], rollout.weight_version)["a"]
    ids = torch.tensor([[5, 6, 7, *output.token_ids]])
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids).logits[0, 2:-1].float() / 0.7, dim=-1)
    expected = log_p[torch.arange(5), ids[0, 3:]].tolist()
    assert output.log_probs == pytest.approx(expected, abs=1e-4 if dtype == "float32" else 0.1)


def test_training_on_leaves_the_rollout_as_it_was(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("llama_tied")
    engine = trained(one, model_dirs["llama_tied"])
    sync_colocated(engine, rollout, rollout.weight_version + 1, torch.float32, "full")
    before = held_by(rollout, one.weights()[0])
    one.train(proto(ragged_batch(4, seed=3)), weighted_log_probs, 4)
    after = held_by(rollout, one.weights()[0])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert any(not torch.equal(after[name], weight) for name, weight in one.weights()[0].items())


class FlipOneBit(TorchDispatchMode):
    """The first copy of a tensor of `rows` rows arrives with its lowest bit wrong in one element."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape, self.flipped = shape, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and tuple(args[0].shape) == self.shape and not self.flipped:
            self.flipped = True
            with torch.no_grad():
                args[0].view(torch.int32)[-1, -1] ^= 1
        return result


def test_a_flipped_bit_is_found_and_named(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("qwen3")
    engine = trained(one, model_dirs["qwen3"])
    version = rollout.weight_version + 1
    memory_fault = FlipOneBit((64, 96))
    with (
        pytest.raises(
            WeightSyncError, match=rf"weight sync {version}: 1 of .*differ: model\.layers\.0\.mlp\.down_proj"
        ),
        memory_fault,
    ):
        sync_colocated(engine, rollout, version, torch.float32, "full")
    assert memory_fault.flipped
    with pytest.raises(StaleWeightsError):
        rollout.generate([Request("a", (5,), SamplingParams(max_tokens=1))], version)
    report = sync_colocated(engine, rollout, version, torch.float32, "full")
    assert report.version == version == rollout.weight_version


def test_samples_take_turns_until_every_tensor_was_compared(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("qwen3")
    engine = trained(one, model_dirs["qwen3"])
    version = rollout.weight_version + 1
    counts, found = [], 0
    for offset in range(8):
        with FlipOneBit((64, 96)):
            try:
                report = sync_colocated(engine, rollout, version + offset, torch.float32, "sample")
                counts.append(report.verified_tensors)
            except WeightSyncError:
                found += 1
    assert found == 1
    report = sync_colocated(engine, rollout, version + 8, torch.float32, "off")
    assert report.verified_tensors == 0 and 0 < max(counts) <= -(-report.tensors // 8)


class Surplus:
    """An engine that sends one tensor more than the rollout's model has."""

    def __init__(self, engine: Any):
        self.engine = engine

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.engine.export(dtype)
        yield "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16)


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_a_tensor_that_the_rollout_drops_is_named(rollouts: Build, one: WorkerGroup, model_dirs, verify: str):
    """vLLM's loaders pass over rotary frequencies without a word; transformers has no such parameter."""
    rollout = rollouts("llama")
    engine: Any = Surplus(trained(one, model_dirs["llama"], steps=1))
    with pytest.raises((WeightSyncError, KeyError), match="inv_freq"):
        sync_colocated(engine, rollout, rollout.weight_version + 1, torch.float32, verify)
    assert rollout.weight_version == -1


def test_two_ranks_export_what_one_does(one: WorkerGroup, two: WorkerGroup, model_dirs):
    for group in (one, two):
        group.build(model_dirs["qwen2"])
    [alone] = [{name: tensor_checksum(t) for name, t in w.items()} for w in one.weights("bfloat16")]
    for weights in two.weights("bfloat16"):
        assert {name: tensor_checksum(t) for name, t in weights.items()} == alone
