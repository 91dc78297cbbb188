"""vLLM shares the trainer's process: what it must leave alone there."""

import torch

from podium.workers.rollout.base import Request, SamplingParams
from tests.models.tiny import tiny_model
from tests.workers.conftest import VLLMEngines, global_state


def test_no_call_moves_global_state(vllm_engines: VLLMEngines):
    """Two threads are set, though the tests run with one: vLLM sets one where it sets any."""
    engine = vllm_engines("llama")
    assert vllm_engines.moved == [], "starting the engine moved these"
    threads = torch.get_num_threads()
    from podium.utils.device import _set_num_threads

    _set_num_threads(2)
    try:
        before = global_state()
        model = tiny_model("llama")
        requests = [Request(f"{i}", (5, 6, 7), SamplingParams(max_tokens=4, seed=[None, 1][i % 2])) for i in range(4)]
        calls = (
            lambda: engine.update_weights(engine.weight_version + 1, model.named_parameters()),
            lambda: engine.pieces(),
            lambda: engine.submit(requests[0]),
            lambda: engine.step(),
            lambda: engine.abort(["0"]),
            lambda: engine.generate(requests, engine.weight_version),
        )
        for index, call in enumerate(calls):
            call()
            after = global_state()
            assert [key for key in before if before[key] != after[key]] == [], f"call {index}"
    finally:
        _set_num_threads(threads)
