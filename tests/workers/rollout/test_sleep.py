"""An engine that sleeps gives its memory back, and answers as before once it has it again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from podium.models.hf_layout import checkpoint_tensors
from podium.workers.rollout.base import Request, RolloutEngine, SamplingParams, StaleWeightsError
from podium.workers.rollout.hf import HFRollout
from tests.models.tiny import tiny_model

REQUESTS = [Request(f"{i}", (5, 6, 7 + i), SamplingParams(max_tokens=8, seed=i)) for i in range(4)]


ARCHITECTURES = {"hf": "qwen3", "vllm": "llama_tied"}


@pytest.fixture(params=ARCHITECTURES)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def engine(kind: str, model_dirs: dict[str, str], vllm_engines: Any) -> Any:
    if kind == "vllm":
        return vllm_engines(ARCHITECTURES[kind])
    return HFRollout(model_dirs[ARCHITECTURES[kind]], dtype="float32", max_num_seqs=4)


@pytest.fixture
def update(engine: RolloutEngine, kind: str) -> Callable[[int], None]:
    """Gives the engine the model of a seed."""

    def update(seed: int) -> None:
        engine.update_weights(engine.weight_version + 1, checkpoint_tensors(tiny_model(ARCHITECTURES[kind], seed=seed)))

    return update


def answers(engine: RolloutEngine) -> Any:
    outputs = engine.generate(REQUESTS, engine.weight_version)
    return [(outputs[r.request_id].token_ids, outputs[r.request_id].log_probs) for r in REQUESTS]


def weight_bytes(engine: RolloutEngine) -> int:
    return sum(storage.nbytes() for storage in {p.tensor.untyped_storage() for p in engine.pieces()})


def test_weights_and_cache_are_given_back_until_the_next_update(engine: RolloutEngine, update: Callable[[int], None]):
    update(1)
    expected, held = answers(engine), weight_bytes(engine)
    version = engine.weight_version
    assert engine.sleep(keep_weights=False) >= held > 0
    assert engine.sleep(keep_weights=False) == 0, "it sleeps already"
    with pytest.raises(StaleWeightsError):
        engine.generate(REQUESTS, version)
    engine.begin_update(version + 1)
    assert weight_bytes(engine) == held
    with pytest.raises(StaleWeightsError):
        engine.generate(REQUESTS, version)
    update(1)
    assert answers(engine) == expected


def test_a_request_wakes_an_engine_that_kept_its_weights(engine: RolloutEngine, update: Callable[[int], None]):
    update(2)
    expected, version = answers(engine), engine.weight_version
    for _ in range(2):
        freed = engine.sleep(keep_weights=True)
        assert (freed > 0) == (not isinstance(engine, HFRollout)), "whose cache goes with each batch"
        assert engine.weight_version == version and answers(engine) == expected
    engine.sleep(keep_weights=True)
    update(3)
    assert engine.weight_version == version + 1 and answers(engine) != expected


def test_nothing_sleeps_while_it_answers(engine: RolloutEngine, update: Callable[[int], None]):
    update(1)
    engine.submit(REQUESTS[0])
    with pytest.raises(RuntimeError, match="1 requests are running"):
        engine.sleep(keep_weights=True)
    engine.abort([REQUESTS[0].request_id])


def test_the_process_is_smaller_by_what_is_freed(tmp_path: Path):
    model = tiny_model("llama", vocab_size=80_000, hidden_size=256, num_attention_heads=4)
    model.save_pretrained(tmp_path)
    engine = HFRollout(str(tmp_path), dtype="float32", max_num_seqs=4)
    engine.update_weights(0, checkpoint_tensors(model))
    process = psutil.Process()
    before = process.memory_info().rss
    freed = engine.sleep(keep_weights=False)
    assert freed > 160e6 and before - process.memory_info().rss > 0.9 * freed
    engine.update_weights(1, checkpoint_tensors(model))
    assert torch.equal(engine._model.lm_head.weight, model.lm_head.weight)
