"""Log-probabilities, entropies and collision probabilities of logits whose vocabulary is split over ranks.

Each rank holds the same rows and its own columns. No rank ever sees a whole row: what travels is a few numbers a row.
The results, and the losses made of them, are alike on every rank, so backward needs no communication.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from podium.utils.torch_functional import logit_rows


@dataclass(frozen=True)
class VocabularyShard:
    """Which columns of the vocabulary a rank has."""

    group: Any
    """The process group over which the vocabulary is split."""
    start: int
    """Token of its first column."""

    def sum(self, values: Tensor) -> Tensor:
        """Adds `values` of all ranks, in place."""
        return self._reduce(values, torch.distributed.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """The largest of all ranks, in place."""
        return self._reduce(values, torch.distributed.ReduceOp.MAX)

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.group.size() > 1:
            torch.distributed.all_reduce(values, op=op, group=self.group)
        return values


@torch.no_grad()
def log_normalizers(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """Logarithm of each row's sum of exponentials over the whole vocabulary, (n, columns) -> (n,) float32."""
    top = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    total = torch.empty_like(top)
    for rows in logit_rows(logits):
        top[rows] = logits[rows].float().amax(dim=-1)
    shard.max(top)
    for rows in logit_rows(logits):
        total[rows] = (logits[rows].float() - top[rows, None]).exp_().sum(dim=-1)
    return shard.sum(total).log_().add_(top)


def log_probs(logits: Tensor, labels: Tensor, normalizers: Tensor, shard: VocabularyShard) -> Tensor:
    """Log-probability of each label, (n,) float32, differentiable in `logits`.

    Args:
        logits: (n, columns), any floating type, already divided by the temperature.
        labels: (n,) int64, tokens of the whole vocabulary.
        normalizers: `log_normalizers` of the same logits.
    """
    return _LogProbs.apply(logits, labels, normalizers, shard)


def entropies(logits: Tensor, normalizers: Tensor, shard: VocabularyShard) -> Tensor:
    """Entropy in nats of each row's distribution, (n,) float32, differentiable in `logits`."""
    return _Entropy.apply(logits, normalizers, shard)


@torch.no_grad()
def sums_pi_squared(logits: Tensor, normalizers: Tensor, shard: VocabularyShard) -> Tensor:
    """Sum over the vocabulary of each row's squared probabilities, (n,) float32, no gradient."""
    out = torch.empty_like(normalizers)
    for rows in logit_rows(logits):
        out[rows] = (2 * (logits[rows].float() - normalizers[rows, None])).exp_().sum(dim=-1)
    return shard.sum(out)


class _LogProbs(torch.autograd.Function):
    """The gradient of a row is one-hot minus softmax; the softmax is made again in backward, some rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, normalizers: Tensor, shard: VocabularyShard) -> Tensor:
        column = labels - shard.start
        own = (column >= 0) & (column < logits.shape[-1])
        column = column.clamp(0, logits.shape[-1] - 1)[:, None]
        chosen = torch.where(own, logits.gather(-1, column).squeeze(-1).float(), 0.0)
        ctx.save_for_backward(logits, column, own, normalizers)
        return shard.sum(chosen) - normalizers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, column, own, normalizers = ctx.saved_tensors
        grad, out = grads[0][:, None], torch.empty_like(logits)
        for rows in logit_rows(logits):
            part = (logits[rows].float() - normalizers[rows, None]).exp_().mul_(-grad[rows])
            out[rows] = part.scatter_add_(-1, column[rows], torch.where(own[rows, None], grad[rows], 0.0))
        return out, None, None, None


class _Entropy(torch.autograd.Function):
    """dH/dx_j = -p_j (log p_j + H); the probabilities are made again in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, normalizers: Tensor, shard: VocabularyShard) -> Tensor:
        entropy = torch.empty_like(normalizers)
        for rows in logit_rows(logits):
            probs = (logits[rows].float() - normalizers[rows, None]).exp_()
            entropy[rows] = torch.special.entr(probs).sum(dim=-1)
        shard.sum(entropy)
        ctx.save_for_backward(logits, normalizers, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, normalizers, entropy = ctx.saved_tensors
        grad, out = grads[0][:, None], torch.empty_like(logits)
        for rows in logit_rows(logits):
            probs = (logits[rows].float() - normalizers[rows, None]).exp_()
            out[rows] = (torch.special.entr(probs) - probs * entropy[rows, None]) * grad[rows]
        return out, None, None
