"""Hugging Face models as trainable modules: found, loaded, and written back as ordinary directories."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict, snapshot_download
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from podium.utils.errors import UserError
from podium.utils.tokenizer import resolve_model


def load_hf_config(path: str, key: str, trust_remote_code: bool = False) -> Any:
    """The model's config, from a directory, the local cache or the hub; says at once when it is in none of them.

    Raises:
        UserError: there is no such model; names the configuration key it came from.
    """
    resolved, local_files_only = resolve_model(path, key=key)
    if Path(resolved).is_dir() and not (Path(resolved) / "config.json").is_file():
        raise UserError(f"{key}={path}: the directory has no config.json, so it is not a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(
            resolved, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{key}={path}: its config does not load ({str(error).strip().splitlines()[0]})") from None


def model_directory(path: str) -> str:
    """The directory with the model's files; a hub name's are downloaded where the cache lacks them.

    Raises:
        UserError: there is no such model.
    """
    resolved, local_files_only = resolve_model(path)
    if Path(resolved).is_dir():
        return resolved
    return snapshot_download(resolved, allow_patterns=["*.json", "*.safetensors"], local_files_only=local_files_only)


def causal_lm_architecture(config: Any) -> str:
    """The class that loads a causal language model of this config."""
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return known[type(config)].__name__


def load_pretrained(
    auto_class: Any, path: str, dtype: torch.dtype, *, gradient_checkpointing: bool, trust_remote_code: bool
) -> torch.nn.Module:
    """A model with its weights, on the CPU, in `dtype`.

    Args:
        auto_class: ``AutoModelForCausalLM`` or ``AutoModel``.
        gradient_checkpointing: recompute activations in backward.

    Raises:
        UserError: the directory lacks weights of the model; transformers would make them up, on each rank its own.
    """
    resolved, local_files_only = resolve_model(path)
    transformers.utils.logging.disable_progress_bar()  # a bar from every rank is no progress report
    model, report = auto_class.from_pretrained(
        resolved,
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{path}: {len(missing)} weights of {type(model).__name__} are not there, the first {missing[0]}; "
            "give a complete checkpoint of a causal language model"
        )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def write_hf(
    path: str, tensors: dict[str, torch.Tensor], config: Any, architecture: str, generation_config: Any | None = None
) -> None:
    """Writes an ordinary Hugging Face directory: config.json and safetensors, in shards where they are large.

    Args:
        tensors: all weights of the model, whole, by name.
        architecture: class that loads the directory.
        generation_config: of a model that generates.
    """
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, target)
    fields = json.loads(config.to_json_string(use_diff=True))
    fields["architectures"] = [architecture]
    (target / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if generation_config is not None:
        generation_config.save_pretrained(target)


def transformer_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers, which are sharded and recomputed one at a time.

    Raises:
        UserError: the architecture does not name them.
    """
    names = set(getattr(model, "_no_split_modules", None) or [])
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            f"{type(model).__name__} names no transformer blocks (_no_split_modules), so it cannot be sharded"
        )
    return blocks


def disable_dropout(model: torch.nn.Module) -> None:
    """Sets every dropout to 0: a policy that changes between two forwards has no well-defined ratio.

    Rates live in dropout modules, in attributes of layers, or in the config that layers read as they run. The layers
    get a config of their own; the model's, which is exported, stays as it is.
    """
    quiet: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _zero_rates(module)
        config = vars(module).get("config")
        if config is not None and module is not model:
            if id(config) not in quiet:
                quiet[id(config)] = copy.deepcopy(config)
                _zero_rates(quiet[id(config)])
            module.config = quiet[id(config)]


def _zero_rates(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)
