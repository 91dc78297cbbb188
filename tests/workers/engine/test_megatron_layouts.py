"""Every layout of the Megatron engine computes and trains what Hugging Face's model and the FSDP engine do."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from podium.models.hf_layout import checkpoint_tensors
from podium.models.value_head import ValueModel
from podium.protocol import WorkerGroup
from podium.workers.engine.forward import forward_scores, forward_values
from podium.workers.engine.spec import Scores, Values
from tests.models.tiny import ARCHITECTURES, EXPERTS, tiny_model
from tests.workers.engine.hosts import weighted_log_probs
from tests.workers.engine.megatron_cases import LAYERS, Start, build, close, close_weights, proto, same
from tests.workers.engine.plain import Batch, plain_outputs, plain_training

DEFAULT = ("tp2", "pp2 vpp2")
MORE = (
    *("tp1", "tp2 sp", "pp2", "pp2 uneven", "dp2", "cp2"),
    *("tp2 pp2", "tp2 dp2", "pp2 dp2", "tp4", "pp4", "cp4", "tp2 cp2 sp", "pp2 cp2"),
    *("pp2 vpp2 dp2", "tp2 pp2 vpp2 sp"),
)
# With experts, tensor parallel needs sequence parallel.
OF_EXPERTS = (
    *("tp1", "dp2", "dp2 ep2", "pp2", "cp2", "pp2 vpp2", "tp2 sp", "tp2 ep2 sp"),
    *("pp2 dp2 ep2", "tp2 dp2 ep2 sp"),
)


def slow(texts: tuple[str, ...]) -> list[Any]:
    return [pytest.param(text, marks=pytest.mark.slow) for text in texts]


LAYOUTS = [*DEFAULT, *slow(MORE)]


class Expected:
    """What others make of the same models and batches; each is computed once."""

    def __init__(self, one: WorkerGroup, paths: dict[str, str], batches: list[Batch]):
        self._one, self._paths, self._batches = one, paths, batches
        self._outputs: dict[str, Batch] = {}
        self._trained: dict[str, tuple[Batch, Batch, list[dict[str, float]]]] = {}

    def outputs(self, name: str) -> Batch:
        """Of Hugging Face's model, row by row."""
        if name not in self._outputs:
            self._outputs[name] = plain_outputs(tiny_model(name, num_hidden_layers=LAYERS), self._batches[0])
        return self._outputs[name]

    def trained(self, name: str) -> tuple[Batch, Batch, list[dict[str, float]]]:
        """Weights after a plain loop and after the FSDP engine, and the metrics of the loop's steps."""
        if name not in self._trained:
            plain, metrics = plain_training(name, self._batches, grad_clip=1.0, num_hidden_layers=LAYERS)
            assert metrics[0]["grad_norm"] > 1.0, "clipping is part of what is tested"
            self._one.build(self._paths[name])
            for batch in self._batches:
                self._one.train(proto(batch), weighted_log_probs, 8)
            self._trained[name] = plain, self._one.weights()[0], metrics
        return self._trained[name]


@pytest.fixture(scope="module")
def expected(one: WorkerGroup, paths: dict[str, str], batches: list[Batch]) -> Expected:
    return Expected(one, paths, batches)


def outputs_equal(start: Start, text: str, name: str, path: str, batch: Batch, expected: Batch) -> None:
    """Padded and packed, in micro-batches of one size and of two; on every rank, also on those that do not answer."""
    for packed, micro in (("", 1), ("", 3), (" packed", 4), (" packed", 3)):
        group = build(start, text + packed, path, frozen=True)
        outputs = group.infer_everywhere(proto(batch), micro).batch
        close(dict(outputs.items()), expected, 1e-4)
        kept = group.kept()
        shards = {key: value.chunk(len({dp for dp, _ in kept})) for key, value in outputs.items()}
        for dp, got in kept:
            same(got, {key: parts[dp] for key, parts in shards.items()})


@pytest.mark.parametrize("text", LAYOUTS)
def test_log_probs_and_entropy_equal_the_plain_model(
    start: Start, paths: dict[str, str], batches: list[Batch], expected: Expected, text: str
):
    for name in ARCHITECTURES:
        outputs_equal(start, text, name, paths[name], batches[0], expected.outputs(name))


@pytest.mark.slow
@pytest.mark.parametrize("text", OF_EXPERTS)
def test_log_probs_and_entropy_of_experts_equal_the_plain_model(
    start: Start, paths: dict[str, str], batches: list[Batch], expected: Expected, text: str
):
    for name in EXPERTS:
        outputs_equal(start, text, name, paths[name], batches[0], expected.outputs(name))


@pytest.fixture(scope="module")
def value_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ValueModel]]:
    """Trained value models, and their directories."""
    models = {}
    for name in ("qwen2", "llama_tied", "qwen3_moe"):
        torch.manual_seed(3)
        model = ValueModel(tiny_model(name, num_hidden_layers=LAYERS).model).eval()
        torch.nn.init.normal_(model.score.weight)
        path = tmp_path_factory.mktemp(name)
        model.config.save_pretrained(path)
        save_file({key: tensor.contiguous() for key, tensor in checkpoint_tensors(model)}, path / "model.safetensors")
        models[name] = str(path), model
    return models


@pytest.mark.parametrize("text", [*LAYOUTS, *slow(("dp2 ep2", "tp2 ep2 sp"))])
def test_values_and_scores_equal_the_plain_model(start: Start, value_models, batches: list[Batch], text: str):
    """Of critics, and of reward models, which answer one token later."""
    valid = batches[0]["response_mask"]
    for name in ("qwen3_moe",) if "ep" in text else ("qwen2", "llama_tied"):
        path, model = value_models[name]
        with torch.no_grad():
            values, scores = forward_values(model, batches[0])["values"], forward_scores(model, batches[0])["scores"]
        for packed, micro in (("", 3), (" packed", 4)):
            group = build(start, text + packed, path, frozen=True, outputs=Values())
            group.set_head(model.score.weight.detach())
            got = {**group.infer(proto(batches[0]), micro).batch}
            group = build(start, text + packed, path, frozen=True, outputs=Scores())
            got |= {**group.infer(proto(batches[0]), micro).batch}
            close(got, {"values": torch.where(valid, values, 0.0), "scores": torch.where(valid, scores, 0.0)}, 1e-4)


def training_equals(
    start: Start, text: str, name: str, path: str, batches: list[Batch], expected: Expected, micro: int
) -> None:
    """Three steps of AdamW with clipping: the weights are those of a plain loop, and those of the FSDP engine."""
    plain, fsdp, metrics_of_plain = expected.trained(name)
    group = build(start, text, path)
    for batch, metrics in zip(batches, metrics_of_plain, strict=True):
        answers = group.train(proto(batch), weighted_log_probs, micro)
        assert all(shard == answers[0] for shard in answers), "shards disagree on the metrics"
        assert {key: answers[0][key] for key in metrics} == pytest.approx(metrics, rel=2e-4)
    for weights in group.weights():
        close_weights(weights, plain)
        close_weights(weights, fsdp)


@pytest.mark.parametrize("text", LAYOUTS)
def test_training_equals_a_plain_loop_and_the_fsdp_engine(
    start: Start, paths: dict[str, str], batches: list[Batch], expected: Expected, text: str
):
    for name in ARCHITECTURES:
        training_equals(start, text, name, paths[name], batches, expected, micro=1)
        training_equals(start, text + " packed", name, paths[name], batches, expected, micro=4)


@pytest.mark.slow
@pytest.mark.parametrize("text", OF_EXPERTS)
def test_training_experts_equals_a_plain_loop_and_the_fsdp_engine(
    start: Start, paths: dict[str, str], batches: list[Batch], expected: Expected, text: str
):
    for name in EXPERTS:
        training_equals(start, text, name, paths[name], batches, expected, micro=1)
        training_equals(start, text + " packed", name, paths[name], batches, expected, micro=4)


@pytest.mark.parametrize("text", LAYOUTS)
def test_weights_there_and_back_are_bit_equal(start: Start, paths: dict[str, str], text: str):
    for name in ARCHITECTURES:
        original = dict(checkpoint_tensors(tiny_model(name, num_hidden_layers=LAYERS)))
        for weights in build(start, text, paths[name], frozen=True).weights():
            same(weights, original)


@pytest.mark.slow
@pytest.mark.parametrize("text", OF_EXPERTS)
def test_weights_of_experts_there_and_back_are_bit_equal(start: Start, paths: dict[str, str], text: str):
    for name in EXPERTS:
        original = dict(checkpoint_tensors(tiny_model(name, num_hidden_layers=LAYERS)))
        for weights in build(start, text, paths[name], frozen=True).weights():
            same(weights, original)
