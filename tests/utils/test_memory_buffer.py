"""Flat buffers: alignment, mixed dtypes, and parameters that stay views of them through training."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.utils.memory_buffer import (
    MemoryBuffer,
    build_memory_buffer,
    build_memory_reference,
    build_memory_reference_from_module,
    calc_padded_numel,
    get_weight_buffer_meta_from_module,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn]
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(torch.Size)


@given(shapes, st.sampled_from([*DTYPES, torch.complex128]))
def test_padding_reaches_the_next_128_bits(shape: torch.Size, dtype: torch.dtype):
    padded = calc_padded_numel(shape, dtype)
    assert padded * dtype.itemsize % 16 == 0
    assert 0 <= (padded - shape.numel()) * dtype.itemsize < 16


@settings(deadline=None)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12))
def test_references_are_aligned_and_overlap_nowhere(parts: list[tuple[torch.Size, torch.dtype]]):
    meta = {f"p{i}": {"shape": shape, "dtype": dtype} for i, (shape, dtype) in enumerate(parts)}
    buffers = build_memory_buffer(meta)
    assert buffers.keys() == {dtype for _, dtype in parts}
    views = build_memory_reference(meta, buffers)
    assert {name: (view.shape, view.dtype) for name, view in views.items()} == {
        name: (each["shape"], each["dtype"]) for name, each in meta.items()
    }
    for dtype, buffer in buffers.items():
        own = [view for view in views.values() if view.dtype == dtype]
        base = buffer.data.data_ptr()
        assert all((view.data_ptr() - base) % 16 == 0 for view in own if view.numel())
        buffer.data.view(torch.uint8).zero_()
        for view in own:
            view.view(torch.uint8).add_(1) if view.dim() else view[None].view(torch.uint8).add_(1)
        assert (buffer.data.view(torch.uint8) <= 1).all(), "two parameters share memory"


def test_a_buffer_uses_the_memory_it_is_given_and_no_more():
    memory = torch.arange(8.0)
    buffer = MemoryBuffer(6, 8, torch.float32, source=memory)
    view = buffer.get(torch.Size([2, 2]), 2)
    assert view.tolist() == [[2.0, 3.0], [4.0, 5.0]] and view.data_ptr() == memory[2:].data_ptr()
    with pytest.raises(AssertionError, match="elements 4 to 8 of 6"):
        buffer.get(torch.Size([4]), 4)
    buffer.zero()
    assert not memory.any()


def mixed_module() -> torch.nn.Module:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 3).bfloat16(), torch.nn.Linear(3, 1))
    module.register_parameter("count", torch.nn.Parameter(torch.arange(3), requires_grad=False))
    module[2].weight.requires_grad_(False)
    return module


def test_a_modules_parameters_move_into_buffers_with_their_values():
    module = mixed_module()
    before = {name: p.clone() for name, p in module.named_parameters()}
    same = dict(module.named_parameters())
    buffers = build_memory_buffer(get_weight_buffer_meta_from_module(module))
    assert buffers.keys() == {torch.float32, torch.bfloat16, torch.int64}
    build_memory_reference_from_module(module, buffers)
    for name, parameter in module.named_parameters():
        assert parameter is same[name] and torch.equal(parameter, before[name])
    buffers[torch.bfloat16].zero()
    assert not module[1].weight.any() and not module[1].bias.any() and module[0].weight.any()


def test_without_their_values_parameters_become_what_the_buffers_hold():
    module = mixed_module()
    buffers = build_memory_buffer(get_weight_buffer_meta_from_module(module))
    buffers[torch.float32].data.fill_(7)
    build_memory_reference_from_module(module, buffers, maintain_weight=False)
    assert (module[0].weight == 7).all() and not module[1].weight.any()


def test_training_keeps_parameters_in_their_buffers_and_changes_nothing_else():
    flat, plain = (mixed_module() for _ in range(2))
    buffers = build_memory_buffer(get_weight_buffer_meta_from_module(flat))
    build_memory_reference_from_module(flat, buffers)
    views = build_memory_reference(get_weight_buffer_meta_from_module(flat), buffers)
    for module in (flat, plain):
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            loss = sum(p.float().square().sum() for p in module.parameters() if p.requires_grad)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, trained), expected in zip(flat.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(trained, expected)
        assert trained.data_ptr() == views[name].data_ptr()


def test_a_shared_parameter_has_one_place():
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, bias=False)})
    module["head"].weight = module["embed"].weight
    meta = get_weight_buffer_meta_from_module(module)
    assert list(meta) == ["embed.weight"]
    build_memory_reference_from_module(module, build_memory_buffer(meta))
    assert module["head"].weight is module["embed"].weight
