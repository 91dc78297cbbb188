"""megatron-core's GPT for a Hugging Face config: one module for each chunk of layers that a rank holds."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)

from podium.models.megatron.config import architecture_of, padded_vocab_size, rope_frequencies, transformer_config
from podium.models.megatron.layers import block_spec
from podium.models.megatron.parallel import MegatronLayout, initialize
from podium.utils.device import device
from podium.utils.memory_buffer import (
    build_memory_buffer,
    build_memory_reference_from_module,
    get_weight_buffer_meta_from_module,
)

# Of a row that only rounds the vocabulary up. Its probability is 0 and, unlike with -inf, so is its part in entropy.
PADDING_LOGIT = -1e9


def build_chunks(
    hf_config: Any,
    layout: MegatronLayout,
    *,
    dtype: torch.dtype = torch.float32,
    value_head: bool = False,
    recompute: bool = False,
) -> list["Chunk"]:
    """This rank's part of the model, on its device, in the order of its virtual stages. `load` fills in the weights.

    The parameters of a chunk are views of one flat buffer. Makes the process groups of `layout` where there are none,
    so every rank calls it.

    Args:
        dtype: of parameters and activations.
        value_head: one value a token instead of logits.
        recompute: keep only each layer's input in forward.

    Raises:
        UserError: see `transformer_config` and `initialize`.
    """
    initialize(layout)
    config = transformer_config(hf_config, layout, dtype=dtype, recompute=recompute)
    stages = range(layout.vpp) if layout.vpp > 1 else [None]
    chunks = [Chunk(config, hf_config, layout, stage, value_head) for stage in stages]
    for chunk in chunks:
        buffers = build_memory_buffer(get_weight_buffer_meta_from_module(chunk))
        build_memory_reference_from_module(chunk, buffers, maintain_weight=False)
    return chunks


class Chunk(GPTModel):
    """A pipeline stage, or with interleaving one of its parts.

    ``chunk(input_ids, position_ids, attention_mask, packed_seq_params=None)``, with `input_ids` and `position_ids`
    (b, s) int64 and the mask of `Attention`. The first stage embeds `input_ids`; the others take the hidden states
    (s, b, h) that ``set_input_tensor`` was given, and all but the last give hidden states. The last gives logits
    (b, s, V / tp) of this rank's part of the vocabulary, or values (b, s, 1). With sequence parallel, s is a
    multiple of tp and hidden states are (s / tp, b, h); with context parallel, s counts this rank's tokens (see
    `local_positions`).
    `position_ids` are not read: rotary embeddings depend on distances only, and count from the start of each row.
    """

    def __init__(self, config: Any, hf_config: Any, layout: MegatronLayout, vp_stage: int | None, value_head: bool):
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        padded = padded_vocab_size(hf_config, layout)
        super().__init__(
            config,
            block_spec(config, vp_stage),
            vocab_size=padded,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=last,
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings and not value_head,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        self.hf_config, self.layout, self.value_head = hf_config, layout, value_head
        self.rotary_pos_emb.inv_freq = rope_frequencies(hf_config)[0].to(device())
        if self.pre_process and architecture_of(hf_config).gemma:
            scale = torch.tensor(hf_config.hidden_size**0.5, dtype=config.params_dtype).item()
            self.embedding.register_forward_hook(lambda _module, _inputs, output: output * scale)
        _mark_split_weights(self)
        if last and value_head:
            self.output_layer = ValueHead(config)
        rank_rows = padded // layout.tp
        own_start = parallel_state.get_tensor_model_parallel_rank() * rank_rows
        self._real_rows = rank_rows if value_head else min(max(hf_config.vocab_size - own_start, 0), rank_rows)
        self._pads = last and self._real_rows < rank_rows

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        output = super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params)
        if self._pads:
            output[..., self._real_rows :] = PADDING_LOGIT
        return output


def _mark_split_weights(chunk: torch.nn.Module) -> None:
    """Says which weights every tensor-parallel rank has another part of; of the others, gradient norms count one.

    megatron-core does it where it initialises weights, which is left out here.
    """
    for module in chunk.modules():
        if isinstance(module, VocabParallelEmbedding | ColumnParallelLinear | RowParallelLinear):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            if module.weight is not None:  # a tied output layer has none of its own
                set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


class ValueHead(torch.nn.Module):
    """Hidden states to one value a token, in the place of the output layer. Starts at zero (see `ValueModel`)."""

    def __init__(self, config: Any):
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        start = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device())
        self.weight = torch.nn.Parameter(start)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: None = None) -> Any:
        """(s, b, 1) from hidden states (s, b, h), or (s / tp, b, h) with sequence parallel; and no bias."""
        values = torch.nn.functional.linear(hidden, self.weight)
        if self._sequence_parallel:
            # The ranks go on with the same values, so a gradient comes from each of them whole.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
