"""Keeping secrets out of what is written down about a run."""

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"(^|_|-)(secret|password|passwd|credentials?)(_|-|$)"
    r"|(api|access|secret|private|auth|license|service|account)[_-]?key$"
    r"|(^|_|-|access|auth|bearer)token$",
    re.IGNORECASE,
)
# In capitals these are environment variables: OPENAI_KEY, HF_TOKEN. In lower case, prompt_key is a column.
_SECRET_VARIABLE = re.compile(r"(^|_)(KEY|TOKEN|PASS)$")
_NOT_SECRET = re.compile(r"(^|_)(eos|bos|pad|unk|sep|cls|mask|image|video|audio|stop)_token$", re.IGNORECASE)
_ENVIRONMENT = ("env", "env_vars", "environment")
# Shorter values ("1", "local") would be found in everything.
_SHORTEST_SECRET = 8


def redact(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """A copy of a nested configuration without secrets.

    Replaced by ``<redacted>``: values under names like ``*_KEY``, ``*_TOKEN``, ``api_key``, ``password``; every value
    of a mapping called ``env``, ``env_vars`` or ``environment``; and any text that contains the value of an environment
    variable with such a name (`environ`, this process's by default).
    """
    environ = os.environ if environ is None else environ
    secrets = [text for name, text in environ.items() if _is_secret(name) and len(text) >= _SHORTEST_SECRET]
    return _redact(value, secrets)


def _is_secret(name: str) -> bool:
    return bool((_SECRET_NAME.search(name) or _SECRET_VARIABLE.search(name)) and not _NOT_SECRET.search(name))


def _redact(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _redact_item(str(name), item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, secrets) for item in value]
    if isinstance(value, str) and any(secret in value for secret in secrets):
        return REDACTED
    return value


def _redact_item(name: str, item: Any, secrets: list[str]) -> Any:
    if item is None or item == "":
        return item
    if name.lower() in _ENVIRONMENT and isinstance(item, Mapping):
        return dict.fromkeys(item, REDACTED)
    if _is_secret(name) and not isinstance(item, Mapping | bool):
        return REDACTED
    return _redact(item, secrets)
