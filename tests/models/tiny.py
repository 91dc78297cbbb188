"""Tiny Hugging Face models and ragged batches, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 101  # vLLM pads it to 128
EOS, PAD = 1, 0

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_CLASSES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    # No head_dim of its own: 4 heads of 32 give 128.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False, "hidden_size": 128, "head_dim": None}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
}
ARCHITECTURES = tuple(_CLASSES)
EXPERTS = ("qwen3_moe", "mixtral")
_OF_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
_CLASSES |= {
    "mistral": (MistralForCausalLM, MistralConfig, {"tie_word_embeddings": False, "sliding_window": 7}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"tie_word_embeddings": True}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, _OF_EXPERTS),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**_OF_EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
}


def tiny_model(name: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A random model in float32. Biases and norms are random too: at 0 and 1 a lost one would not be missed."""
    model_class, config_class, own = _CLASSES[name]
    fields = {k: v for k, v in {**_SHAPE, **own, **changes}.items() if v is not None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**fields)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_tiny(name: str, path: Path, seed: int = 0, **changes: Any) -> str:
    """Writes `tiny_model` as a Hugging Face directory; its generation config ends at two tokens, as many models' do."""
    model = tiny_model(name, seed, **changes)
    model.generation_config.eos_token_id = [EOS, EOS + 1]
    model.save_pretrained(path)
    return str(path)


def ragged_batch(rows: int, prompt_width: int = 6, width: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of 1..P tokens, left-padded, and responses of 1..R tokens, right-padded.

    Also what losses read: ``old_log_probs``, ``advantages``, ``returns``, ``values`` (b, R).
    """
    g = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(1, prompt_width + 1, (rows, 1), generator=g)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    prompt_mask = torch.arange(prompt_width) >= prompt_width - prompt_lengths
    response_mask = torch.arange(width) < lengths
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    ids = torch.randint(2, VOCABULARY, attention_mask.shape, generator=g)
    input_ids = torch.where(attention_mask, ids, PAD)
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0),
        "responses": input_ids[:, prompt_width:].clone(),
        "response_mask": response_mask,
    }
    for name in ("old_log_probs", "advantages", "returns", "values"):
        batch[name] = torch.randn(rows, width, generator=g) - (3.0 if name == "old_log_probs" else 0.0)
    return batch


def plain_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Next-token logits (L, V) float32 of one sequence, without padding, mask or cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def row_tokens(batch: dict[str, torch.Tensor], row: int) -> tuple[list[int], list[int]]:
    """Prompt and response of one row, without padding."""
    prompt_width = batch["input_ids"].shape[1] - batch["responses"].shape[1]
    mask = batch["attention_mask"][row].bool()
    ids = batch["input_ids"][row]
    return ids[:prompt_width][mask[:prompt_width]].tolist(), ids[prompt_width:][mask[prompt_width:]].tolist()
