"""The parameters of a Hugging Face model, from its config.json alone: names, shapes, and along what each can be cut."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from podium.utils.errors import UserError

Cut = Literal["whole", "vocabulary", "q", "k", "v", "rows", "columns"]
"""What tensor parallelism does with a parameter: nothing, rows of the vocabulary, rows by heads, rows (of a layer whose
outputs are split), or columns (of a layer whose inputs are split)."""


@dataclass(frozen=True)
class Parameter:
    """A whole tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    layer: int | None = None
    """None: embedding, last norm and head."""
    expert: int | None = None
    """None: not a part of an expert."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Family:
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    """Where config.json does not say."""
    mlp: str = "mlp"
    expert_width: str = "intermediate_size"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "gemma": _Family(tied=True),
    "qwen3_moe": _Family(qk_norm=True, expert_width="moe_intermediate_size"),
    "mixtral": _Family(mlp="block_sparse_moe", expert_parts=("w1", "w3", "w2")),
}


@dataclass(frozen=True)
class ModelShape:
    """The sizes that layouts depend on."""

    model_type: str
    vocab: int
    hidden: int
    width: int
    """Hidden units of a dense MLP."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    """0: dense."""
    expert_width: int
    expert_layers: frozenset[int]
    """The layers whose MLP is experts."""
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    """The head is the embedding: one tensor, under the embedding's name."""
    dtype: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Reads the content of a config.json.

        Raises:
            UserError: an unknown model_type, or a field that is missing.
        """
        family = _FAMILIES.get(config.get("model_type", ""))
        if family is None:
            raise UserError(f"model_type={config.get('model_type')!r}: expected one of {', '.join(_FAMILIES)}")
        heads, layers = _size(config, "num_attention_heads"), _size(config, "num_hidden_layers")
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        step = config.get("decoder_sparse_step") or 1
        dense = set(config.get("mlp_only_layers") or ())
        bias = bool(config.get("attention_bias"))
        return cls(
            model_type=config["model_type"],
            vocab=_size(config, "vocab_size"),
            hidden=_size(config, "hidden_size"),
            width=_size(config, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or _size(config, "hidden_size") // heads,
            experts=experts,
            expert_width=_size(config, family.expert_width) if experts else 0,
            expert_layers=frozenset(i for i in range(layers) if experts and i not in dense and (i + 1) % step == 0),
            attention_bias=bias or family.qkv_bias,
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias")),
            tied=config.get("tie_word_embeddings", family.tied),
            dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        )

    @classmethod
    def load(cls, path: str) -> "ModelShape":
        """Reads a config.json, or that of a model's directory.

        Raises:
            UserError: there is none, or it describes no model that is known.
        """
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            config = json.loads(file.read_text())
        except OSError as error:
            raise UserError(f"--model {path}: {file} does not open ({error.strerror})") from None
        except ValueError as error:
            raise UserError(f"--model {path}: {file} is not JSON ({error})") from None
        try:
            return cls.from_config(config)
        except UserError as error:
            raise UserError(f"--model {path}: {error}") from None

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, in the order of the forward."""
        yield Parameter("model.embed_tokens.weight", (self.vocab, self.hidden), "vocabulary")
        for layer in range(self.layers):
            yield from self._layer(layer)
        yield Parameter("model.norm.weight", (self.hidden,), "whole")
        if not self.tied:
            yield Parameter("lm_head.weight", (self.vocab, self.hidden), "vocabulary")

    def _layer(self, layer: int) -> Iterator[Parameter]:
        prefix, family = f"model.layers.{layer}.", _FAMILIES[self.model_type]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Parameter(f"{prefix}{norm}.weight", (self.hidden,), "whole", layer)
        cuts: tuple[Cut, Cut, Cut] = ("q", "k", "v")
        for cut, heads in zip(cuts, (self.heads, self.kv_heads, self.kv_heads), strict=True):
            rows, name = heads * self.head_dim, f"{prefix}self_attn.{cut}_proj"
            yield Parameter(f"{name}.weight", (rows, self.hidden), cut, layer)
            if self.attention_bias:
                yield Parameter(f"{name}.bias", (rows,), cut, layer)
            if family.qk_norm and cut != "v":
                yield Parameter(f"{prefix}self_attn.{cut}_norm.weight", (self.head_dim,), "whole", layer)
        yield Parameter(f"{prefix}self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim), "columns", layer)
        if self.output_bias:
            yield Parameter(f"{prefix}self_attn.o_proj.bias", (self.hidden,), "whole", layer)
        if layer not in self.expert_layers:
            yield from self._mlp(f"{prefix}mlp.", _Family.expert_parts, self.width, layer, None)
            return
        yield Parameter(f"{prefix}{family.mlp}.gate.weight", (self.experts, self.hidden), "whole", layer)
        for expert in range(self.experts):
            name = f"{prefix}{family.mlp}.experts.{expert}."
            yield from self._mlp(name, family.expert_parts, self.expert_width, layer, expert)

    def _mlp(
        self, prefix: str, parts: tuple[str, str, str], width: int, layer: int, expert: int | None
    ) -> Iterator[Parameter]:
        gate, up, down = parts
        for name in (gate, up):
            yield Parameter(f"{prefix}{name}.weight", (width, self.hidden), "rows", layer, expert)
        yield Parameter(f"{prefix}{down}.weight", (self.hidden, width), "columns", layer, expert)
        if self.mlp_bias:
            for name in (gate, up):
                yield Parameter(f"{prefix}{name}.bias", (width,), "rows", layer, expert)
            yield Parameter(f"{prefix}{down}.bias", (self.hidden,), "whole", layer, expert)


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{key}={value!r}: expected a whole number of at least 1")
    return value
