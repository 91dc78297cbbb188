"""Trained weights arrive in the rollout bit for bit, and what does not arrive is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from podium.protocol import WorkerGroup
from podium.utils.errors import UserError
from podium.utils.piece import Piece
from podium.workers.rollout.base import Request, RolloutEngine, SamplingParams, StaleWeightsError
from podium.workers.rollout.hf import HFRollout
from podium.workers.weight_sync.transport.base import WeightSyncError
from tests.models.tiny import ARCHITECTURES, ragged_batch, tiny_model
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.test_fsdp import proto
from tests.workers.weight_sync.ends import connected

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


def held_by(rollout: RolloutEngine) -> dict[str, torch.Tensor]:
    """What generation uses, on one rank: every piece is a whole tensor."""
    return {piece.name: piece.tensor.clone() for piece in rollout.pieces()}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in ARCHITECTURES), ("qwen2", "bfloat16")])
def test_every_weight_arrives_bit_for_bit(rollouts: Build, one: WorkerGroup, model_dirs, name: str, dtype: str):
    rollout = rollouts(name, dtype)
    transport = connected(trained(one, model_dirs[name]), rollout)
    for _ in range(2):
        one.train(proto(ragged_batch(4, seed=9)), weighted_log_probs, 4)
        sent = {n: p.to(getattr(torch, dtype)) for n, p in one.weights()[0].items()}
        report = transport.sync(rollout.weight_version + 1)
        torch.testing.assert_close(held_by(rollout), sent, rtol=0, atol=0)
        assert report.version == rollout.weight_version and report.transport == "colocated"
        assert report.verified_buckets == report.buckets > 0
        assert report.bytes_local == sum(t.numel() for t in sent.values()) * getattr(torch, dtype).itemsize
        assert report.bytes_sent == report.bytes_received == 0
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
    connected(trained(one, model_dirs["llama_tied"]), rollout).sync(rollout.weight_version + 1)
    before = held_by(rollout)
    one.train(proto(ragged_batch(4, seed=3)), weighted_log_probs, 4)
    after = held_by(rollout)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert any(not torch.equal(after[name], weight) for name, weight in one.weights()[0].items())


class FlipOneBit(TorchDispatchMode):
    """The first copy of a tensor of a shape arrives with its lowest bit wrong in one element."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape, self.flipped = shape, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._foreach_copy_.default and not self.flipped:
            copied = [tensor for tensor in args[0] if tuple(tensor.shape) == self.shape]
            for tensor in copied[:1]:
                self.flipped = True
                tensor.view(torch.int32)[-1, -1] ^= 1
        return result


def test_a_flipped_bit_is_found_and_named(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("qwen3")
    transport = connected(trained(one, model_dirs["qwen3"]), rollout, bucket_bytes=64 * 96 * 4)
    version = rollout.weight_version + 1
    memory_fault = FlipOneBit((64, 96))
    named = rf"weight sync {version}: rank 0: verification: .* of model\.layers\.0\.mlp\.down_proj\.weight$"
    with pytest.raises(WeightSyncError, match=named), memory_fault:
        transport.sync(version)
    assert memory_fault.flipped
    with pytest.raises(StaleWeightsError):
        rollout.generate([Request("a", (5,), SamplingParams(max_tokens=1))], version)
    assert transport.sync(version).version == version == rollout.weight_version


def test_samples_take_turns_until_every_bucket_was_compared(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("qwen3")
    engine = trained(one, model_dirs["qwen3"])
    transport = connected(engine, rollout, verify="sample", bucket_bytes=64 * 96 * 4)
    version = rollout.weight_version + 1
    reports, found = [], 0
    for offset in range(8):
        with FlipOneBit((64, 96)):
            try:
                reports.append(transport.sync(version + offset))
            except WeightSyncError:
                found += 1
    assert found == 1
    assert all(0 < report.verified_buckets <= -(-report.buckets // 8) for report in reports)
    assert connected(engine, rollout, verify="sample").sync(version + 8).verified_buckets == 1, "of one"
    assert connected(engine, rollout, verify="off").sync(version + 9).verified_buckets == 0


def test_buckets_cut_tensors_between_rows(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("qwen3")
    engine = trained(one, model_dirs["qwen3"])
    report = connected(engine, rollout, bucket_bytes=1000).sync(rollout.weight_version + 1)
    torch.testing.assert_close(held_by(rollout), dict(one.weights()[0]), rtol=0, atol=0)
    assert report.buckets > report.bytes_local / 1000


def test_a_tensor_that_the_rollout_has_no_place_for_is_named(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("llama")
    engine: Any = trained(one, model_dirs["llama"], steps=1)
    surplus = Piece("model.layers.0.self_attn.rotary_emb.inv_freq", (0,), (16,), torch.ones(16))
    engine.pieces = lambda: [*type(engine).pieces(engine), surplus]
    with pytest.raises(UserError, match="inv_freq"):
        connected(engine, rollout)


def test_a_tensor_that_the_trainer_lacks_is_named(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("llama")
    engine: Any = trained(one, model_dirs["llama"], steps=1)
    engine.pieces = lambda: [piece for piece in type(engine).pieces(engine) if piece.name != "lm_head.weight"]
    with pytest.raises(UserError, match=r"lm_head\.weight: rank 0 wants \[0:101, 0:64\], no source has any"):
        connected(engine, rollout)


def test_a_running_rollout_keeps_its_weights(rollouts: Build, one: WorkerGroup, model_dirs):
    rollout = rollouts("qwen3")
    transport = connected(trained(one, model_dirs["qwen3"]), rollout)
    version = rollout.weight_version + 1
    transport.sync(version)
    before = held_by(rollout)
    one.train(proto(ragged_batch(4, seed=3)), weighted_log_probs, 4)
    rollout.submit(Request("a", (5,), SamplingParams(max_tokens=2)))
    with pytest.raises(RuntimeError, match="1 requests are running"):
        transport.sync(version + 1)
    rollout.abort(["a"])
    with pytest.raises(ValueError, match=f"version {version} offered"):
        transport.sync(version)
    assert rollout.weight_version == version
    torch.testing.assert_close(held_by(rollout), before, rtol=0, atol=0)
