"""Keeping secrets out of what is written down and said about a run."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podium.utils.errors import UserError

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"(^|_)(secrets?|passwords?|passwd|passphrase|credentials?|authorization|auth|bearer|cookies?)(_|$)"
    r"|(api|access|secret|private|auth|license|service|account)_?keys?$"
    r"|(^|_|access|auth|bearer)token$",
    re.IGNORECASE,
)
# In capitals these are environment variables: OPENAI_KEY, HF_TOKEN. In lower case, prompt_key is a column.
_SECRET_CAPITALS = re.compile(r"(^|_)(KEY|TOKEN|PASS)$")
_NOT_SECRET = re.compile(r"(^|_)(eos|bos|pad|unk|sep|cls|mask|image|video|audio|stop)_token$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|PASS$|CREDENTIAL|AUTHORIZATION|COOKIE", re.IGNORECASE)
_ENVIRONMENT = ("env", "env_vars", "environment")
# Shorter values ("1", "local") would be found in everything.
_SHORTEST_SECRET = 8

# What OmegaConf reads from the environment, alone or as in "Bearer ${oc.env:JUDGE_KEY}".
_REFERENCE = re.compile(r"([A-Za-z]+ )?\$\{oc\.env:\w+\}")
_IN_TEXT = (
    re.compile(r"(\b[a-zA-Z][\w+.-]{0,20}://)(?![^/\s?#\"'@]*\$\{oc\.env)[^/\s?#\"']+(?=@)"),
    re.compile(r"([?&][\w-]*(?:key|token|secret|password|signature)=)(?!\$\{)[^&#\s\"']+", re.IGNORECASE),
    re.compile(r"(\bBearer\s+)(?!\$\{)[^\s\"',;)\]}]+"),
)
_ASSIGNMENT = re.compile(
    r"(?P<prefix>\.?)(?<![\w-])(?P<name>[\w-]+)[\"']?\s*(?P<sign>[:=])\s*"
    r"(?P<value>(?!\$\{)(\"[^\"]*\"|'[^']*'|((Bearer|Basic|Token)\s+)?[^\s,;&\"'(){}\[\]]+))"
)


def redact(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """A copy of a nested configuration without secrets.

    Replaced by ``<redacted>``: whatever is under names like ``*_KEY``, ``*_TOKEN``, ``api_key``, ``password``,
    ``Authorization``, or in a mapping called ``env``, ``env_vars`` or ``environment``; and in other text what
    `redact_text` finds. What an environment variable holds (`environ`, this process's by default) becomes
    ``${oc.env:NAME}``, which a run that is configured by the copy reads again.
    """
    environ = os.environ if environ is None else environ
    return _redact(value, False, _references(environ, secret=True), _references(environ, secret=False))


def redact_text(text: str, secrets: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
    """Text without `secrets`, values of secret-looking environment variables, user info in URLs and bearer tokens."""
    text = _replace(text, _references(os.environ if environ is None else environ, secret=True))
    return _in_text(_replace(text, dict.fromkeys(sorted(secrets, key=len, reverse=True), REDACTED)))


def redact_arguments(text: str) -> str:
    """As `redact_text`, and without what is assigned to secret names: of a command line that is shown in an error."""
    text, at = redact_text(text), 0
    while found := _ASSIGNMENT.search(text, at):
        at = found.end("name")
        is_message = found["prefix"] and found["sign"] == ":"  # "a.b.api_key: what is wrong with it"
        if _is_secret(found["name"]) and not is_message:
            at = found.start("value") + len(REDACTED)
            text = text[: found.start("value")] + REDACTED + text[found.end("value") :]
    return text


def secret_values(config: Any) -> list[str]:
    """What a configuration has under secret names, whole and word by word, for `redact_text`."""
    hidden = [str(value) for _, value, is_secret in _leaves(config) if is_secret and value is not None]
    return [word for text in hidden for word in {text, *text.split()} if len(word) >= _SHORTEST_SECRET]


def require_secrets(config: Any, option: str = "") -> None:
    """Refuses a configuration whose secrets were not written down and have not been given again.

    Args:
        option: what comes before ``key=value`` on the command line.

    Raises:
        UserError: with their keys.
    """
    hidden = [key for key, value, _ in _leaves(config) if isinstance(value, str) and REDACTED in value]
    if hidden:
        raise UserError(
            f"{', '.join(hidden)}: a secret is not written down with a run; give it again, best as "
            f"{option}'{hidden[0]}=${{oc.env:NAME}}' with the environment variable NAME set (a run that is given it "
            "like that writes the variable down, which is then all that is needed)"
        )


def _leaves(value: Any, key: str = "", is_secret: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Dotted key, value, and whether some name above it says that it is a secret."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name), is_secret or _hides(str(name), item))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}[{number}]", is_secret)
    else:
        yield key, value, is_secret


def _is_secret(name: str) -> bool:
    words = re.sub(r"-|(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool((_SECRET_NAME.search(words) or _SECRET_CAPITALS.search(name)) and not _NOT_SECRET.search(name))


def _hides(name: str, item: Any) -> bool:
    return _is_secret(name) or (name.lower() in _ENVIRONMENT and isinstance(item, Mapping))


def _redact(value: Any, is_secret: bool, secret: Mapping[str, str], variables: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _redact(item, is_secret or _hides(str(name), item), secret, variables) for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact(item, is_secret, secret, variables) for item in value]
    if is_secret and value not in (None, "") and not isinstance(value, bool):
        text = str(value)
        text = text if _REFERENCE.fullmatch(text) else _replace(text, variables)
        return text if _REFERENCE.fullmatch(text) else REDACTED
    return _in_text(_replace(value, secret)) if isinstance(value, str) else value


def _references(environ: Mapping[str, str], *, secret: bool) -> dict[str, str]:
    """What stands for the values of environment variables: the longest first, since one may be in another.

    Args:
        secret: of those alone whose names say so.
    """
    long = {
        text: f"${{oc.env:{name}}}"
        for name, text in environ.items()
        if len(text) >= _SHORTEST_SECRET and name.isidentifier() and (not secret or _SECRET_VARIABLE.search(name))
    }
    return dict(sorted(long.items(), key=lambda item: len(item[0]), reverse=True))


def _in_text(text: str) -> str:
    for pattern in _IN_TEXT:
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def _replace(text: str, replacements: Mapping[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text
