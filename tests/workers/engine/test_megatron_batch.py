"""How a batch is laid out for a Megatron model, without one."""

from types import SimpleNamespace

import pytest
import torch

from podium.models.megatron.parallel import MegatronLayout
from podium.workers.engine.spec import LogProbs
from tests.models.tiny import ragged_batch, row_tokens

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

from podium.models.megatron.layers import Attention
from podium.workers.engine import megatron_batch
from podium.workers.engine.megatron_batch import micro_batches


@pytest.mark.parametrize("pack", [False, True])
def test_the_tokens_that_have_an_output_are_told_by_the_one_before(pack: bool):
    batch = ragged_batch(5)
    seen = torch.zeros(batch["responses"].shape, dtype=torch.long)
    for start, micro in enumerate(micro_batches(batch, 2, LogProbs(), MegatronLayout(), pack)):
        rows = seen[2 * start : 2 * start + 2]
        rows.view(-1)[micro.slots] = micro.following
        ids = micro.input_ids.flatten()
        for number in range(len(rows)):
            prompt, response = row_tokens(batch, 2 * start + number)
            places = micro.places[micro.slots // rows.shape[1] == number].tolist()
            assert ids[places].tolist() == [prompt[-1], *response[:-1]]
    assert torch.equal(seen, torch.where(batch["response_mask"], batch["responses"], 0))


@pytest.mark.parametrize("pack", [False, True])
def test_no_length_is_read_back_from_the_device(pack: bool, monkeypatch: pytest.MonkeyPatch):
    """A meta tensor raises where somebody asks what is in it, which on CUDA would wait for the device."""
    monkeypatch.setattr(megatron_batch, "device", lambda: torch.device("meta"))
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = SimpleNamespace(window_size=None, window_attn_skip_freq=None)
    attention = Attention(config, 1, None, "self", softmax_scale=1.0, pg_collection=SimpleNamespace(cp=alone))
    for micro in micro_batches(ragged_batch(5), 2, LogProbs(), MegatronLayout(), pack):
        assert {each.device.type for each in (micro.input_ids, micro.places, micro.slots, *micro.rows.values())} == {
            "meta"
        }
        rows, tokens = micro.input_ids.shape
        shape = (tokens, 4, 8) if pack else (tokens, rows, 4, 8)
        query = torch.empty(shape, device="meta")
        attended = attention(query, query, query, None, packed_seq_params=micro.packed)
        assert attended.shape == (*shape[:-2], 32)
