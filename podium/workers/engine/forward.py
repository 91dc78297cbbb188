"""One forward of a Hugging Face model over a padded batch, down to per-token outputs at the response positions."""

import torch

from podium.utils.torch_functional import (
    entropy_from_logits,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
)
from podium.workers.engine.base import Tensors


def forward_log_probs(
    model: torch.nn.Module, batch: Tensors, temperature: float, entropy_grad: bool, sum_pi_squared: bool = False
) -> Tensors:
    """``log_probs`` of the response tokens and ``entropy`` of their distributions, (b, R) float32.

    With `sum_pi_squared`, and where no gradient is taken, also the sum of their squared probabilities. All are taken at
    the sampling temperature: that is the policy which drew the tokens.
    """
    inputs, kept = _trim(batch)
    logits = model(**inputs, use_cache=False, logits_to_keep=kept + 1).logits[:, :-1]
    if temperature != 1.0:
        logits = logits / temperature
    width = batch["responses"].shape[1]
    log_probs = logprobs_from_logits(logits, batch["responses"][:, :kept])
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = entropy_from_logits(logits)
    outputs = {"log_probs": log_probs, "entropy": entropy}
    if sum_pi_squared and not torch.is_grad_enabled():
        outputs["sum_pi_squared"] = sum_pi_squared_from_logits(logits)
    return {name: _widen(values, width) for name, values in outputs.items()}


def forward_values(model: torch.nn.Module, batch: Tensors) -> Tensors:
    """``values`` (b, R) float32: position t holds the value of the state in which response token t is chosen."""
    inputs, kept = _trim(batch)
    values = model(**inputs)[:, -kept - 1 : -1, 0].float()
    return {"values": _widen(values, batch["responses"].shape[1])}


def forward_scores(model: torch.nn.Module, batch: Tensors) -> Tensors:
    """``scores`` (b, R) float32: position t holds the score of the sequence that ends with response token t."""
    inputs, kept = _trim(batch)
    scores = model(**inputs)[:, -kept:, 0].float()
    return {"scores": _widen(scores, batch["responses"].shape[1])}


def _trim(batch: Tensors) -> tuple[dict[str, torch.Tensor | None], int]:
    """Cuts the columns that are padding in every row, and drops a mask that hides nothing.

    Prompts are left-padded and responses right-padded, so what is left is one contiguous window. Returns the
    model's inputs and the number of response columns kept, at least 1.
    """
    width = batch["responses"].shape[1]
    mask = batch["attention_mask"].bool()
    used = mask.any(dim=0).nonzero().flatten()
    prompt_width = mask.shape[1] - width
    first = min(int(used[0]), prompt_width - 1) if len(used) else prompt_width - 1
    last = max(int(used[-1]) + 1, prompt_width + 1) if len(used) else prompt_width + 1
    mask = mask[:, first:last]
    inputs = {
        "input_ids": batch["input_ids"][:, first:last],
        "position_ids": batch["position_ids"][:, first:last],
        "attention_mask": None if bool(mask.all()) else mask.long(),
    }
    return inputs, last - prompt_width


def _widen(values: torch.Tensor, width: int) -> torch.Tensor:
    """Back to the batch's response width: trimmed columns are 0."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))
