"""Outputs and training of a Hugging Face model, written down once more without padding, masks or micro-batches."""

from typing import Any

import torch

from podium.models.hf_layout import checkpoint_tensors
from tests.models.tiny import row_tokens, tiny_model
from tests.workers.engine.hosts import ENTROPY_COEFF, TEMPERATURE, small_steps

Batch = dict[str, torch.Tensor]


def plain_outputs(model: torch.nn.Module, batch: Batch) -> Batch:
    """``log_probs``, ``entropy`` and ``sum_pi_squared`` (b, R), 0 where there is no response token."""
    names = ("log_probs", "entropy", "sum_pi_squared")
    outputs = {name: torch.zeros(batch["responses"].shape) for name in names}
    for row in range(len(batch["input_ids"])):
        prompt, response = row_tokens(batch, row)
        log_p = _log_p(model, prompt, response)
        values = (log_p[torch.arange(len(response)), torch.tensor(response)], *_moments(log_p))
        for name, value in zip(names, values, strict=True):
            outputs[name][row, : len(response)] = value.detach()
    return outputs


def plain_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """`weighted_log_probs`."""
    total = torch.zeros(())
    for row in range(len(batch["input_ids"])):
        prompt, response = row_tokens(batch, row)
        log_p = _log_p(model, prompt, response)
        chosen = log_p[torch.arange(len(response)), torch.tensor(response)]
        advantages = batch["advantages"][row, : len(response)]
        total = total - (advantages * chosen + ENTROPY_COEFF * _moments(log_p)[0]).sum()
    return total / batch["response_mask"].sum()


def plain_training(
    name: str, batches: list[Batch], grad_clip: float, **changes: Any
) -> tuple[Batch, list[dict[str, float]]]:
    """Weights under their names in a checkpoint, and metrics of each step, after AdamW steps on `tiny_model`."""
    model, config = tiny_model(name, **changes), small_steps()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, eps=config.eps, betas=tuple(config.betas))
    metrics = []
    for step, batch in enumerate(batches):
        lr = config.lr * min(1.0, (step + 1) / 2)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        loss = plain_loss(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        metrics.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    return dict(checkpoint_tensors(model)), metrics


def _log_p(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, dim=-1)


def _moments(log_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return -(log_p.exp() * log_p).sum(dim=-1), (2 * log_p).exp().sum(dim=-1)
