"""Hugging Face models as trainable modules: found, loaded, and written back as ordinary directories."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from podium.utils.errors import UserError


def load_hf_config(path: str, key: str, trust_remote_code: bool = False) -> Any:
    """The model's config, from a directory or the local hub cache; never waits for a network.

    Raises:
        UserError: there is no such model here; names the configuration key it came from.
    """
    if not path:
        raise UserError(f"{key} is not set: expected a Hugging Face model directory or a cached hub name")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(f"{key}={path}: the directory has no config.json, so it is not a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}={path}: no model there ({first}); expected a directory with config.json and weights, or a hub name "
            f"already downloaded with `hf download {path}`"
        ) from None


def load_causal_lm(path: str, dtype: torch.dtype, *, gradient_checkpointing: bool, trust_remote_code: bool) -> torch.nn.Module:
    """The model with its weights, on the CPU, in `dtype`, in train mode with dropout as the checkpoint has it."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code, local_files_only=True
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def transformer_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers, which are sharded and recomputed one at a time.

    Raises:
        UserError: the architecture does not name them.
    """
    names = set(getattr(model, "_no_split_modules", None) or [])
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(f"{type(model).__name__} names no transformer blocks (_no_split_modules), so it cannot be sharded")
    return blocks


def disable_dropout(model: torch.nn.Module) -> None:
    """Sets every dropout to 0: a policy that changes between two forwards has no well-defined ratio."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
