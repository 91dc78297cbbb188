"""Per-token outputs of padded batches against unpadded rows, one at a time."""

import pytest
import torch

from podium.models.value_head import ValueModel
from podium.workers.engine.forward import forward_log_probs, forward_values
from tests.models.tiny import ARCHITECTURES, plain_logits, ragged_batch, row_tokens, tiny_model

TEMPERATURE = 0.6


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(3))
def test_log_probs_and_entropy_equal_the_plain_model(name: str, seed: int):
    model = tiny_model(name, seed)
    batch = ragged_batch(5, seed=seed)
    with torch.no_grad():
        outputs = forward_log_probs(model, batch, TEMPERATURE, entropy_grad=False)
    for row in range(5):
        prompt, response = row_tokens(batch, row)
        log_p = torch.log_softmax(plain_logits(model, prompt + response)[len(prompt) - 1 : -1] / TEMPERATURE, dim=-1)
        expected = log_p[torch.arange(len(response)), torch.tensor(response)]
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        torch.testing.assert_close(outputs["log_probs"][row, : len(response)], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(outputs["entropy"][row, : len(response)], entropy, rtol=0, atol=2e-5)


def test_outputs_have_the_width_of_the_batch_and_zeros_where_no_row_reaches():
    batch = ragged_batch(3, prompt_width=5, width=4)
    wide = {name: torch.nn.functional.pad(value, (0, 6)) for name, value in batch.items()}
    outputs = forward_log_probs(tiny_model("llama"), wide, 1.0, entropy_grad=True)
    for value in outputs.values():
        assert value.shape == (3, 10) and value.dtype == torch.float32
        assert not value[:, 4:].any()


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_entropy_has_a_gradient_only_on_demand(entropy_grad: bool):
    outputs = forward_log_probs(tiny_model("llama"), ragged_batch(2), 1.0, entropy_grad=entropy_grad)
    assert outputs["log_probs"].requires_grad and outputs["entropy"].requires_grad == entropy_grad


def test_a_row_without_any_token_disturbs_no_other():
    model = tiny_model("qwen2")
    batch = ragged_batch(4)
    empty = {name: value.clone() for name, value in batch.items()}
    for name in ("attention_mask", "response_mask"):
        empty[name][1] = False
    for entry in (batch, empty):
        entry["input_ids"].requires_grad_(False)
    whole, rest = (forward_log_probs(model, entry, 1.0, entropy_grad=False)["log_probs"] for entry in (batch, empty))
    keep = [0, 2, 3]
    mask = batch["response_mask"][keep]
    torch.testing.assert_close(rest[keep][mask], whole[keep][mask], rtol=0, atol=1e-5)
    torch.where(empty["response_mask"], rest, 0.0).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("empty", ["no row", "no response", "one token"])
def test_batches_with_next_to_nothing(empty: str):
    batch = ragged_batch(2)
    if empty == "no row":
        batch["attention_mask"][:] = batch["response_mask"][:] = False
    if empty == "no response":
        batch["attention_mask"][:, 6:] = batch["response_mask"][:] = False
    if empty == "one token":
        batch["attention_mask"][:, 7:] = batch["response_mask"][:, 1:] = False
    outputs = forward_log_probs(tiny_model("llama"), batch, 1.0, entropy_grad=False)
    assert outputs["log_probs"].shape == (2, 7) and outputs["log_probs"].isfinite().all()


def test_value_t_is_of_the_state_before_token_t():
    value_model = ValueModel(tiny_model("qwen3").model)
    torch.nn.init.normal_(value_model.score.weight)
    batch = ragged_batch(5)
    with torch.no_grad():
        values = forward_values(value_model, batch)["values"]
        for row in range(5):
            prompt, response = row_tokens(batch, row)
            for t in range(len(response)):
                hidden = value_model.model(torch.tensor([prompt + response[:t]])).last_hidden_state[0, -1]
                assert values[row, t].item() == pytest.approx(value_model.score(hidden).item(), abs=2e-5)
