"""Configuration files: YAML, or the config.json that every run leaves in its directory."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from podium.utils.errors import UserError

Setting = tuple[str, str, Any]
"""Where it is from (for errors), dotted key, value."""


def split_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """Takes ``--config FILE`` and ``--config=FILE`` out of `argv`. Returns what is left, and the files in order.

    Raises:
        UserError: ``--config`` without a file.
    """
    rest, files, words = [], [], iter(argv)
    for word in words:
        if word == "--config":
            word = f"--config={next(words, '')}"
        if not word.startswith("--config="):
            rest.append(word)
        elif word == "--config=":
            raise UserError("--config needs a file: YAML, or the config.json of a run")
        else:
            files.append(word.removeprefix("--config="))
    return rest, files


def read_settings(path: str, known: Mapping[str, Any]) -> list[Setting]:
    """The settings of one file; nested mappings become dotted keys, down to the keys that are `known`.

    Raises:
        UserError: no such file, or not a mapping of keys.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))  # JSON is YAML
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}") from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: neither YAML nor JSON ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected a mapping of keys, got {type(content).__name__}")
    return [(f"{path}: {key}={value}", key, value) for key, value in _flatten(content, known, "")]


def _flatten(content: Mapping[Any, Any], known: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known:
            yield from _flatten(value, known, key + ".")
        else:
            yield key, value
