"""What is added to a response's score for its length."""

from __future__ import annotations

import torch
from torch import Tensor

from podium.utils.errors import UserError


@torch.no_grad()
def overlong_penalty(
    response_length: Tensor, max_response_length: int, buffer_len: int, penalty_factor: float
) -> Tensor:
    """DAPO's soft penalty for length (arXiv 2503.14476), to be added to the score.

    0 up to ``max_response_length - buffer_len`` tokens, from there falling in a line to ``-penalty_factor`` at the
    maximum.

    Args:
        response_length: (B,), tokens.
        max_response_length, buffer_len: tokens.
        penalty_factor: in units of score.

    Returns:
        (B,), float32, at most 0.
    """
    if not 0 < buffer_len <= max_response_length:
        raise UserError(
            f"overlong_buffer.len is {buffer_len}; expected 1 to {max_response_length} tokens, data.max_response_length"
        )
    excess = response_length.float() - (max_response_length - buffer_len)
    return -(excess / buffer_len * penalty_factor).clamp(min=0.0)
