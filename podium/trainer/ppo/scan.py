"""Discounted sums over the rest of a row, without a loop over time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 32


def discounted_suffix_sum(values: Tensor, decay: float) -> Tensor:
    """``y[:, t] = values[:, t] + decay * y[:, t + 1]``, (B, T) -> (B, T) float64.

    A chunk's sums are one product with a triangular matrix of powers of ``decay``; the same function, applied to the
    chunks' heads with ``decay ** chunk``, says what each chunk receives from the ones after it. float64 because the
    product must not fall to TF32 or bfloat16 where the process allows them for matmuls.
    """
    if decay == 1.0:  # the usual setting, and plain sums are faster still
        return values.double().flip(-1).cumsum(dim=-1).flip(-1)
    batch, length = values.shape
    width = min(_CHUNK, length)
    if width == 0:
        return values.double()
    padding = -length % width
    chunks = F.pad(values.double(), (0, padding)).view(batch, -1, width)
    powers = torch.pow(float(decay), torch.arange(width + 1, dtype=torch.float64, device=values.device))
    steps = torch.arange(width, device=values.device)
    distance = steps[:, None] - steps[None, :]  # from the output's step (column) forward to the input's (row)
    triangle = torch.where(distance >= 0, powers[distance.clamp(min=0)], 0.0)
    local = chunks @ triangle
    if chunks.shape[1] > 1:
        heads = discounted_suffix_sum(local[:, :, 0].contiguous(), float(decay) ** width)
        received = F.pad(heads[:, 1:], (0, 1)).unsqueeze(-1)
        local.addcmul_(received, powers[1:].flip(0).expand(1, 1, -1))
    return local.view(batch, -1)[:, :length]
