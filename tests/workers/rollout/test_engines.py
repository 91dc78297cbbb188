"""What every rollout engine promises, on each of them, against plain forwards of the same Hugging Face model."""

import dataclasses
from typing import Any

import pytest
import torch

from podium.utils.errors import UserError
from podium.workers.rollout.base import Output, Request, RolloutEngine, SamplingParams, StaleWeightsError
from podium.workers.rollout.hf import HFRollout
from tests.models.tiny import ARCHITECTURES, EOS, VOCABULARY, plain_logits, tiny_model
from tests.workers.conftest import MAX_NUM_SEQS

PROMPTS = [tuple(range(7, 9 + i)) for i in range(6)]


@pytest.fixture(scope="module")
def hf_engines(model_dirs: dict[str, str]):
    engines = {name: HFRollout(path, dtype="float32", max_num_seqs=MAX_NUM_SEQS) for name, path in model_dirs.items()}
    return engines.__getitem__


@pytest.fixture(params=["hf", "vllm"])
def engines(request: pytest.FixtureRequest):
    """Engines of one kind by architecture."""
    return request.getfixturevalue(f"{request.param}_engines")


@pytest.fixture
def engine(engines) -> RolloutEngine:
    """A Qwen2 with the weights of seed 0."""
    return loaded(engines("qwen2"), tiny_model("qwen2"))


def loaded(engine: RolloutEngine, model: torch.nn.Module) -> RolloutEngine:
    engine.abort([f"{i}" for i in range(100)])
    engine.update_weights(engine.weight_version + 1, model.named_parameters())
    return engine


def requests(prompts: list[tuple[int, ...]] = PROMPTS, **sampling: Any) -> list[Request]:
    settings = {"max_tokens": 10, "temperature": 0.8, **sampling}
    return [Request(f"{i}", prompt, SamplingParams(seed=i, **settings)) for i, prompt in enumerate(prompts)]


def generate(engine: RolloutEngine, batch: list[Request]) -> list[Output]:
    outputs = engine.generate(batch, engine.weight_version)
    assert outputs.keys() == {request.request_id for request in batch} and engine.num_unfinished == 0
    return [outputs[request.request_id] for request in batch]


def restricted(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probs (V,) of the distribution that a token is drawn from, token by token."""
    if sampling.temperature == 0:
        return torch.log_softmax(logits, dim=-1)
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    kept = order if sampling.top_k < 0 else order[: sampling.top_k]
    probs = torch.softmax(logits[kept].double() / sampling.temperature, dim=-1)
    mass, nucleus = 0.0, []
    for token, prob in zip(kept, probs.tolist(), strict=True):
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += prob
    result = torch.full((len(logits),), -torch.inf)
    result[nucleus] = torch.log_softmax(logits[nucleus] / sampling.temperature, dim=-1)
    return result


def check_log_probs(model: torch.nn.Module, request: Request, output: Output, atol: float = 1e-4) -> None:
    logits = plain_logits(model, [*request.prompt_ids, *output.token_ids])[len(request.prompt_ids) - 1 : -1]
    expected = [float(restricted(row, request.sampling)[t]) for row, t in zip(logits, output.token_ids, strict=True)]
    assert output.log_probs == pytest.approx(expected, abs=atol)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_are_those_of_the_plain_model(engines, name: str):
    model = tiny_model(name, seed=4)
    engine = loaded(engines(name), model)
    for request, output in zip(requests(), generate(engine, requests()), strict=True):
        assert len(output.token_ids) == 10 and output.finish_reason == "length"
        assert output.weight_versions == [engine.weight_version] * 10
        assert output.request_id == request.request_id and output.sampling == request.sampling
        check_log_probs(model, request, output)


def test_a_response_does_not_depend_on_what_shares_its_batch(engine: RolloutEngine):
    alone = [generate(engine, [request])[0].token_ids for request in requests()]
    assert [o.token_ids for o in generate(engine, requests())] == alone
    assert [o.token_ids for o in generate(engine, requests()[::-1])] == alone[::-1]
    mates = [
        Request("m0", (3, 4), SamplingParams(max_tokens=20, temperature=0.0)),
        Request("m1", (3, 4, 5) * 9, SamplingParams(max_tokens=3, temperature=1.5)),  # no seed
        Request("m2", (9,), SamplingParams(max_tokens=6, top_k=3, seed=5)),
    ]
    mixed = [mates[0], *requests()[:3], mates[1], *requests()[3:], mates[2]]
    outputs = {o.request_id: o.token_ids for o in generate(engine, mixed)}
    assert [outputs[request.request_id] for request in requests()] == alone
    other = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, seed=99)) for r in requests()]
    assert all(o.token_ids != tokens for o, tokens in zip(generate(engine, other), alone, strict=True))


def test_the_same_prompt_with_other_seeds_gives_other_responses(engine: RolloutEngine):
    outputs = generate(engine, requests([PROMPTS[0]] * 8))
    assert len({tuple(output.token_ids) for output in outputs}) == 8


def test_greedy_equals_hf_generate(engine: RolloutEngine):
    model: Any = tiny_model("qwen2")
    for request, output in zip(requests(), generate(engine, requests(temperature=0.0)), strict=True):
        prompt = torch.tensor([request.prompt_ids])
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=10, eos_token_id=None
        )
        assert output.token_ids == expected[0, len(request.prompt_ids) :].tolist()


def test_sampling_params_of_every_kind_share_a_batch(engine: RolloutEngine):
    kinds = [
        SamplingParams(max_tokens=12, temperature=0.0),
        SamplingParams(max_tokens=5, temperature=1.3, seed=1),
        SamplingParams(max_tokens=12, temperature=0.9, top_k=5, seed=2),
        SamplingParams(max_tokens=12, temperature=1.2, top_p=0.6, seed=3),
        SamplingParams(max_tokens=9, temperature=1.5, top_k=20, top_p=0.8, seed=4),
        SamplingParams(max_tokens=1, temperature=0.5, top_p=0.01),
        SamplingParams(max_tokens=3, temperature=1.0, top_k=1, seed=5),
        SamplingParams(max_tokens=7, temperature=0.0, top_k=2, top_p=0.5),
        SamplingParams(max_tokens=7, temperature=1.0, top_k=5 * VOCABULARY, seed=6),
    ]
    batch = [Request(f"{i}", PROMPTS[i % 6], sampling) for i, sampling in enumerate(kinds)]
    model = tiny_model("qwen2")
    for request, output in zip(batch, generate(engine, batch), strict=True):
        assert len(output.token_ids) == request.sampling.max_tokens
        check_log_probs(model, request, output)


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 6}, {"top_p": 0.7}, {"top_k": 12, "top_p": 0.8, "temperature": 1.4}]
)
def test_first_tokens_have_the_distribution_computed_by_hand(engine: RolloutEngine, sampling: dict[str, Any]):
    draws = 1600
    batch = requests([PROMPTS[2]] * draws, max_tokens=1, **sampling)
    counts = torch.zeros(VOCABULARY)
    for output in generate(engine, batch):
        counts[output.token_ids[0]] += 1
    log_p = restricted(plain_logits(tiny_model("qwen2"), list(PROMPTS[2]))[-1], batch[0].sampling)
    probs = log_p.exp()
    assert not counts[probs == 0].any()
    common = probs * draws >= 8
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * draws
    chi_square = float(((observed - expected).square() / expected.clamp(min=1e-3)).sum())
    freedom = int(common.sum())
    assert freedom > 3 and chi_square < freedom + 4 * (2 * freedom) ** 0.5, (chi_square, freedom)


def test_a_stop_token_ends_the_response_and_belongs_to_it(engine: RolloutEngine):
    free = generate(engine, requests())
    stops = [(output.token_ids[4],) for output in free]
    batch = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, stop_token_ids=s))
        for r, s in zip(requests(), stops, strict=True)
    ]
    for output, stop, whole in zip(generate(engine, batch), stops, free, strict=True):
        first = whole.token_ids.index(stop[0]) + 1
        assert output.token_ids == whole.token_ids[:first] and output.finish_reason == "stop"
        assert output.log_probs == pytest.approx(whole.log_probs[:first], abs=1e-5)
    last = dataclasses.replace(batch[0].sampling, max_tokens=free[0].token_ids.index(stops[0][0]) + 1)
    assert generate(engine, [dataclasses.replace(batch[0], sampling=last)])[0].finish_reason == "stop"


def test_only_the_requests_own_stop_tokens_count(engine: RolloutEngine):
    outputs = generate(engine, requests([PROMPTS[0]] * 12, max_tokens=60, temperature=2.0))
    assert any({EOS, EOS + 1} & set(output.token_ids[:-1]) for output in outputs), "the model's own eos was drawn"
    assert all(len(output.token_ids) == 60 for output in outputs)
    ending = generate(engine, requests([PROMPTS[0]] * 12, max_tokens=60, temperature=2.0, stop_token_ids=(EOS,)))
    for output, whole in zip(ending, outputs, strict=True):
        end = whole.token_ids.index(EOS) + 1 if EOS in whole.token_ids else 60
        assert output.token_ids == whole.token_ids[:end]


def test_more_requests_than_fit(engine: RolloutEngine):
    batch = requests([PROMPTS[i % 6] for i in range(3 * MAX_NUM_SEQS + 1)], max_tokens=6)
    alone = generate(engine, [batch[-1]])[0]
    assert generate(engine, batch)[-1].token_ids == alone.token_ids


def test_abort_gives_what_there_is_and_the_engine_goes_on(engine: RolloutEngine):
    batch = requests([PROMPTS[i % 6] for i in range(MAX_NUM_SEQS + 2)])
    whole = {o.request_id: o for o in generate(engine, batch)}
    for request in batch:
        engine.submit(request)
    for _ in range(4):
        assert engine.step() == []
    waiting = f"{MAX_NUM_SEQS + 1}"
    aborted = {o.request_id: o for o in engine.abort(["1", "4", waiting, "never submitted"])}
    assert aborted.keys() == {"1", "4", waiting} and engine.num_unfinished == len(batch) - 3
    for output in aborted.values():
        count = len(output.token_ids)
        assert output.finish_reason == "abort" and len(output.log_probs) == len(output.weight_versions) == count
        assert output.token_ids == whole[output.request_id].token_ids[:count]
        assert output.log_probs == pytest.approx(whole[output.request_id].log_probs[:count], abs=1e-5)
    assert len(aborted["1"].token_ids) >= 3 and aborted[waiting].token_ids == []
    finished = {}
    while engine.num_unfinished:
        finished.update({o.request_id: o for o in engine.step()})
    assert finished.keys() == whole.keys() - aborted.keys()
    assert all(finished[i].token_ids == whole[i].token_ids for i in finished)
    assert engine.step() == [] and engine.abort(["1"]) == []


def test_after_aborting_everything_new_weights_may_come(engine: RolloutEngine):
    for request in requests():
        engine.submit(request)
    engine.step()
    engine.step()
    version = engine.weight_version
    other = tiny_model("qwen2", seed=1)
    with pytest.raises(RuntimeError, match="6 requests are running"):
        engine.update_weights(version + 1, other.named_parameters())
    assert engine.weight_version == version, "a refusal changes nothing"
    engine.abort([request.request_id for request in requests()])
    engine.update_weights(version + 1, other.named_parameters())
    for request, output in zip(requests(), generate(engine, requests()), strict=True):
        check_log_probs(other, request, output)


def test_nothing_computed_from_older_weights_is_used_again(engine: RolloutEngine):
    """The prompt is longer than vLLM's block of 128 tokens, so that its keys and values are cached."""
    prompt = tuple(2 + i % 90 for i in range(200))
    batch = requests([prompt, prompt], max_tokens=4)
    for seed in (0, 1, 2):
        model = tiny_model("qwen2", seed)
        loaded(engine, model)
        for _ in range(2):
            for request, output in zip(batch, generate(engine, batch), strict=True):
                check_log_probs(model, request, output)


def test_stale_weights_do_not_answer(engine: RolloutEngine):
    version = engine.weight_version
    with pytest.raises(StaleWeightsError, match=f"version {version + 1} or newer, the engine holds {version}"):
        engine.generate(requests(), version + 1)
    assert engine.num_unfinished == 0
    assert len(engine.generate(requests(), version)) == 6
    for older in (version, version - 1):
        with pytest.raises(ValueError, match=f"weights of version {older} offered"):
            engine.update_weights(older, iter(()))
    assert engine.weight_version == version and len(generate(engine, requests())) == 6


@pytest.mark.parametrize("failure", ["sender fails", "unknown name", "incomplete", "wrong shape"])
def test_a_failed_update_leaves_an_engine_that_refuses(engine: RolloutEngine, failure: str):
    version = engine.weight_version

    def weights():
        for index, (name, tensor) in enumerate(tiny_model("qwen2", seed=1).named_parameters()):
            if index == 5:
                if failure == "sender fails":
                    raise ConnectionError("lost")
                if failure == "unknown name":
                    yield "model.layers.0.nonsense.weight", tensor
                if failure == "incomplete":
                    continue
                if failure == "wrong shape":
                    tensor = tensor[:-1]
            yield name, tensor

    with pytest.raises(Exception):  # noqa: B017 - each engine has its own
        engine.update_weights(version + 1, weights())
    assert engine.weight_version == -1
    for oldest in (version, 0, -1):
        with pytest.raises(StaleWeightsError):
            engine.generate(requests(), oldest)
    with pytest.raises(StaleWeightsError):
        engine.submit(requests()[0])
    assert engine.num_unfinished == 0
    model = tiny_model("qwen2", seed=2)
    engine.update_weights(version + 2, model.named_parameters())
    for request, output in zip(requests(), generate(engine, requests()), strict=True):
        check_log_probs(model, request, output)


def test_the_engine_keeps_its_own_copy(engine: RolloutEngine):
    model = tiny_model("qwen2")
    loaded(engine, model)
    before = [output.token_ids for output in generate(engine, requests())]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert [output.token_ids for output in generate(engine, requests())] == before


def test_a_refused_request_takes_the_others_of_its_call_along(engine: RolloutEngine):
    with pytest.raises(ValueError, match="ids must differ"):
        engine.generate([*requests(), requests()[0]], engine.weight_version)
    assert engine.num_unfinished == 0, "what stays behind would block the next weight update"
    loaded(engine, tiny_model("qwen2"))
    generate(engine, requests())


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}, {"top_k": -2}]
)
def test_sampling_params_outside_their_range_are_refused(wrong: dict[str, Any]):
    [(name, value)] = wrong.items()
    with pytest.raises(UserError, match=f"{name}={value}, expected"):
        SamplingParams(**{"max_tokens": 1, **wrong})


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="request a: the prompt has no token"):
        Request("a", (), SamplingParams(max_tokens=1))
