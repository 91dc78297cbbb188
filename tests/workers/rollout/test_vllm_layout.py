"""Each piece lies where vLLM's own loader puts what it is a piece of."""

import pytest
import torch

from tests.models.tiny import ARCHITECTURES, tiny_model
from tests.workers.conftest import VLLMEngines


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pieces_are_what_the_loader_fills(vllm_engines: VLLMEngines, name: str):
    engine = vllm_engines(name)
    sent = {name: p.detach() for name, p in tiny_model(name, seed=5).named_parameters()}
    for piece in engine.pieces():
        piece.tensor.fill_(torch.nan)
    engine._model().load_weights(sent.items())
    pieces = engine.pieces()
    assert {piece.name for piece in pieces} == sent.keys()
    for piece in pieces:
        assert piece.starts == (0,) * piece.tensor.dim(), "one rank holds whole tensors"
        torch.testing.assert_close(piece.tensor, sent[piece.name], rtol=0, atol=0)
