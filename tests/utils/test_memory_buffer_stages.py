"""The buffers of all pipeline stages: one storage, global names, and what is freed."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.utils.memory_buffer import (
    MegatronMemoryBufferForRollout,
    build_memory_buffer,
    build_memory_reference_from_module,
    get_weight_buffer_meta_from_module,
    normalize_pp_vpp_params,
)


def stage(layers: list[int], dtype: torch.dtype = torch.float32) -> torch.nn.ModuleList:
    """Chunks of so many layers each, in mixed precision."""
    chunks = []
    for count in layers:
        blocks = [torch.nn.Linear(3, 2, dtype=dtype) for _ in range(count)]
        chunk = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks), "norm": torch.nn.LayerNorm(5)})
        chunks.append(chunk)
    return torch.nn.ModuleList(chunks)


def rollout(stages: list[torch.nn.ModuleList], own: int) -> MegatronMemoryBufferForRollout:
    metas = [get_weight_buffer_meta_from_module(each) for each in stages]
    buffers = build_memory_buffer(metas[own])
    build_memory_reference_from_module(stages[own], buffers)
    result = MegatronMemoryBufferForRollout(
        lambda weights: {f"{i}.{name}": tensor for i, each in enumerate(weights) for name, tensor in each.items()}
    )
    result.initialize_weight_buffer(metas, own, buffers)
    return result


def test_three_views_of_one_storage_and_the_own_stage_in_place():
    stages = [stage([2, 1]), stage([1, 2], torch.bfloat16)]
    memory = rollout(stages, own=1)
    assert memory.memory_buffers == [] and memory.named_parameters == {}, "nothing is allocated before it is needed"
    memory.build_memory_reference()
    assert [set(each) for each in memory.memory_buffers] == [{torch.float32}, {torch.bfloat16, torch.float32}]
    for number, each in enumerate(memory.weight_buffers):
        spans = [
            range(buffer.data.data_ptr(), buffer.data.data_ptr() + buffer.data.nbytes)
            for buffer in memory.memory_buffers[number].values()
        ]
        for name, tensor in each.items():
            assert any(tensor.data_ptr() in span for span in spans)
            assert memory.named_parameters[f"{number}.{name}"].data_ptr() == tensor.data_ptr()
    for name, parameter in stages[1].named_parameters():
        assert memory.weight_buffers[1][name].data_ptr() == parameter.data_ptr()
    assert [[sorted(chunk) for chunk in each] for each in memory.get_all_params()] == [
        [sorted(name for name, _ in chunk.named_parameters()) for chunk in each] for each in stages
    ]


def test_foreign_stages_are_freed_and_the_own_one_stays():
    stages = [stage([1]), stage([1])]
    memory = rollout(stages, own=0)
    memory.build_memory_reference()
    foreign, own = (weakref.ref(memory.memory_buffers[i][torch.float32].data) for i in (1, 0))
    memory.release()
    gc.collect()
    assert foreign() is None and own() is not None
    memory.build_memory_reference()
    assert memory.memory_buffers[0][torch.float32].data is own()


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=4))
def test_layers_get_their_numbers_in_the_model(counts: list[list[int]]):
    """Layer i of the model holds the value i: whatever the split, it comes back under the name i."""
    params: list[list[dict[str, torch.Tensor]]] = [[{}, {}] for _ in counts]
    number = 0
    for chunk in range(2):
        for pp, each in enumerate(counts):
            for layer in range(each[chunk]):
                params[pp][chunk][f"decoder.layers.{layer}.weight"] = torch.tensor(number)
                number += 1
    params[0][0]["embedding.weight"] = torch.tensor(-1)
    named = normalize_pp_vpp_params(params, number)
    assert {name: int(value) for name, value in named.items()} == {
        "embedding.weight": -1,
        **{f"decoder.layers.{i}.weight": i for i in range(number)},
    }
    with pytest.raises(ValueError, match=f"the stages have {number} layers, the model {number + 1}"):
        normalize_pp_vpp_params(params, number + 1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([[{"layers.0.w": 0, "layers.2.w": 0}]], "expected 0 and on, no gaps"),
        ([[{"norm.w": 0, "layers.0.w": 0}], [{"norm.w": 0, "layers.0.w": 0}]], "norm.w is on two stages"),
        ([[{}, {}], [{}]], "stage 1 has 1 chunks"),
    ],
)
def test_what_is_no_pipeline(params, message: str):
    with pytest.raises(ValueError, match=message):
        normalize_pp_vpp_params(params, 2)
