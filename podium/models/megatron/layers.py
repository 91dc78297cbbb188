"""Transformer layers that need neither TransformerEngine nor CUDA: a norm and an attention for megatron-core's GPT."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from podium.models.megatron.context import gathered_order
from podium.utils.device import device


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019); megatron-core's own refuses sequence parallel.

    ``config.layernorm_zero_centered_gamma`` makes the scale 1 + weight.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self._eps, self._offset = eps, float(config.layernorm_zero_centered_gamma)
        start = torch.full((hidden_size,), 1.0 - self._offset, dtype=config.params_dtype, device=device())
        self.weight = torch.nn.Parameter(start)
        # Each tensor-parallel rank then sees a part of the tokens: gradients are summed over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if self._offset:
            scaled = rms_norm(hidden.float(), shape, eps=self._eps) * (self._offset + self.weight.float())
            return scaled.to(hidden.dtype)
        return rms_norm(hidden, shape, self.weight, self._eps)


class Attention(MegatronModule):
    """Causal attention by ``scaled_dot_product_attention``; megatron-core's own takes no packed sequences.

    Takes one of two forms, both also split over context-parallel ranks (see `local_positions`):

    * rows: query (s, b, h, d), key and value (s, b, g, d), and `attention_mask` (b, s over all ranks) bool, True at
      tokens, or None where padding is only to the right, where a causal mask hides it;
    * packed: query (t, h, d), key and value (t, g, d), with ``packed_seq_params.cu_seqlens_q``, and no mask.

    Returns (s, b, h * d) or (t, h * d).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        softmax_scale: float,
        pg_collection: Any,
        cp_comm_type: str | None = None,
    ):
        super().__init__(config=config)
        self._scale, self._cp = softmax_scale, pg_collection.cp
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if slides else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            key, value = self._whole(key, value, (0, query.shape[0] * self._cp.size()))
            query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            out = self._attend(query, key, value, attention_mask)
            return out.permute(2, 0, 1, 3).flatten(2)
        assert attention_mask is None, "packed sequences have no padding to mask"
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        key, value = self._whole(key, value, bounds)
        parts = []
        for start, stop in pairwise(bounds):
            own = slice(start // self._cp.size(), stop // self._cp.size())
            q, k, v = (each.transpose(0, 1)[None] for each in (query[own], key[start:stop], value[start:stop]))
            parts.append(self._attend(q, k, v, None)[0].transpose(0, 1))
        return torch.cat(parts).flatten(1)

    def _whole(
        self, key: torch.Tensor, value: torch.Tensor, bounds: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens (t, ...) in order, from this context-parallel rank's (t / cp, ...)."""
        if self._cp.size() == 1:
            return key, value
        both = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=self._cp
        )
        both = both.index_select(0, gathered_order(bounds, self._cp.size()).to(both.device))
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None
    ) -> torch.Tensor:
        """(b, h, n, d) of n queries that this rank holds, over keys and values (b, g, n * cp, d) of all ranks."""
        parts = []
        for start, chunk in self._chunks(query):
            stop = start + chunk.shape[2]
            mask = _mask(start, stop, self._window, valid, query.device)
            parts.append(
                scaled_dot_product_attention(
                    chunk,
                    key[:, :, :stop],
                    value[:, :, :stop],
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=self._scale,
                    enable_gqa=key.shape[1] != chunk.shape[1],
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _chunks(self, query: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Contiguous parts of one sequence's queries on this rank, and the position of the first of each."""
        size, rank = self._cp.size(), self._cp.rank()
        if size == 1:
            yield 0, query
            return
        half = query.shape[2] // 2
        yield rank * half, query[:, :, :half]
        yield (2 * size - 1 - rank) * half, query[:, :, half:]


def _mask(
    start: int, stop: int, window: int | None, valid: torch.Tensor | None, where: torch.device
) -> torch.Tensor | None:
    """True where queries at positions start..stop see keys at 0..stop; None for the plain causal mask.

    With a window, a token sees itself and the window - 1 tokens before it.
    """
    if window is None or stop <= window:
        window = stop
    if start == 0 and valid is None and window == stop:
        return None
    seen = torch.ones(stop - start, stop, dtype=torch.bool, device=where).tril(diagonal=start)
    if window < stop:
        seen = seen.triu(diagonal=start - window + 1)
    if valid is None:
        return seen
    own = torch.ones_like(seen).tril(diagonal=start).triu(diagonal=start)
    # A padding token sees itself: a row that sees nothing would be NaN, and reach the others through its gradient.
    return (seen & valid[:, None, None, :stop]) | own


def block_spec(config: Any, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = Attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
