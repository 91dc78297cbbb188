"""Loading a tokenizer, and finding out quickly whether a model is there at all."""

import functools
import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from podium.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE_TIMEOUT_S = 5.0


def load_tokenizer(path: str, trust_remote_code: bool = False, *, key: str = "model.path") -> "PreTrainedTokenizerBase":
    """The tokenizer of a Hugging Face directory or hub name, ready for batched generation.

    The pad token falls back to the end-of-sequence token (masks come from lengths, so the two may be one), and padding
    goes to the left. `key` is the configuration key that errors name.

    Raises:
        UserError: nothing at `path`, a hub name that is neither cached nor reachable, or files that do not load.
    """
    path, local_files_only = resolve_model(path, key=key)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    except Exception as error:  # transformers raises whatever the first reader that fails raises
        raise UserError(f"{key}={path}: no tokenizer loads from there ({_first_line(error)})") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"{key}={path}: the tokenizer has no end-of-sequence token; set eos_token in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def stop_token_ids(path: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's, and those of the model's generation_config.json.

    Chat models often end a turn with another token than the one that ends a document; their generation config names
    both.
    """
    from transformers import GenerationConfig

    path, local_files_only = resolve_model(path)
    try:
        named = GenerationConfig.from_pretrained(path, local_files_only=local_files_only).eos_token_id
    except OSError:  # the file is optional
        named = None
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [] if named is None else [named])]
    return tuple(dict.fromkeys(ids))


def resolve_model(path: str, *, key: str = "model.path") -> tuple[str, bool]:
    """Decides at once where a model comes from: ``(path, local_files_only)`` for ``from_pretrained``.

    The hub's own client retries for most of a minute when there is no network; here one short probe decides, and a
    cached model is used without asking the hub.

    Raises:
        UserError: no such directory, or a hub name that is neither cached nor reachable.
    """
    if not path:
        raise UserError(f"{key} is not set: give a Hugging Face directory or a hub name")
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        return expanded, True
    if os.path.exists(expanded):
        raise UserError(f"{key}={path} is a file; give the directory that holds config.json")
    if _looks_like_path(path):
        raise UserError(f"{key}={path}: there is no such directory")
    if _hub_is_reachable():
        return path, False
    if _is_cached(path):
        return path, True
    raise UserError(
        f"{key}={path} is neither a directory here nor in the local Hugging Face cache, and the hub cannot be reached; "
        "give a local directory, or download the model first"
    )


def _looks_like_path(path: str) -> bool:
    """Hub names are ``name`` or ``owner/name``; everything else can only be meant as a path."""
    return path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1 or "\\" in path


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = (try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json"))
        return any(isinstance(file, str) and Path(file).exists() for file in found)
    except ValueError:  # not a valid hub name
        return False


@functools.cache
def _hub_is_reachable() -> bool:
    """One request to the hub; any answer counts. In a thread, because looking up a name has no deadline of its own."""
    if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE_VARIABLES):
        return False
    answered = threading.Event()

    def probe() -> None:
        request = urllib.request.Request(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError):
            return
        answered.set()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PROBE_TIMEOUT_S)
    return answered.is_set()


_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
