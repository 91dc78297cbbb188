"""From a command line to a typed configuration. Imports no torch, ray or vllm, so mistakes are told at once."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import sys
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from podium.trainer.config.files import read_settings, split_files
from podium.trainer.config.verl_keys import instead_of
from podium.utils.errors import UserError
from podium.utils.redact import require_secrets

T = TypeVar("T")


def load_config(cls: type[T], overrides: list[str], files: Sequence[str] = ()) -> tuple[T, set[str]]:
    """Builds `cls` from its defaults, then `files` (YAML or JSON), then overrides.

    Overrides are Hydra's: ``a.b=1``, ``a.c=[x,y]``, ``a.d=null``. Where `cls` has ``FOLLOWS`` (section -> section),
    keys of the first that are not set take the second's values.

    Returns:
        The configuration, and the keys that were set: by an override, or by a file to something else than the default
        (the config.json of a run names every key).

    Raises:
        UserError: syntax, an unknown key (with the nearest one named), a value of the wrong type, or a secret that the
            config.json of a run does not have.
    """
    config = OmegaConf.structured(cls)
    known = {key: kind for key, kind, _, _ in walk(cls)}
    defaults = {key: default for key, _, default, _ in walk(cls)}
    explicit = set()
    from_files = [setting for file in files for setting in read_settings(file, known)]
    for text, key, value in [*from_files, *((text, *_parse(text)) for text in overrides)]:
        if text in overrides or defaults.get(key) != value:
            explicit.add(key)
        if key not in known and not _inside_free_form(key, known):
            raise UserError(f"{text}: there is no key '{key}'; {_hint(key, known)}")
        if known.get(key) == list[str] and isinstance(value, str):
            value = [value]  # a list of one
        try:
            OmegaConf.update(config, key, value, force_add=_inside_free_form(key, known))
        except OmegaConfBaseException:
            kind = known.get(key)
            if typing.get_origin(kind) is dict:  # what was meant for one of its keys may be a secret
                raise UserError(f"{key} takes {_in_words(kind)}, got {type(value).__name__}") from None
            raise UserError(f"{text}: {key} takes {_in_words(kind)}, got {value!r}") from None
    for section, leader in getattr(cls, "FOLLOWS", {}).items():
        for key in known:
            if key.startswith(f"{section}.") and key not in explicit:
                OmegaConf.update(config, key, OmegaConf.select(config, leader + key.removeprefix(section)))
    require_secrets(OmegaConf.to_container(config))
    try:
        return typing.cast(T, OmegaConf.to_object(config)), explicit
    except OmegaConfBaseException as error:  # a ${...} that leads nowhere
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _parse(text: str) -> tuple[str, Any]:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(
            f"{text}: not of the form key=value ({str(error).splitlines()[0]}); a value with special characters needs "
            "quotes that the shell keeps: \"key='...'\""
        ) from None
    if override.is_delete() or override.is_sweep_override():
        raise UserError(
            f"{text}: only key=value is understood (no deletions, no sweeps); a value with commas needs quotes that "
            "the shell keeps: \"key='a,b'\""
        )
    key, value = override.key_or_group, override.value()
    raw = text.partition("=")[2].strip()
    # Hydra takes the band 0.5_2 for the number 0.52. Where a number is wanted, the key's type makes it one again.
    return key, raw if isinstance(value, int | float) and "_" in raw else value


def _hint(key: str, known: dict[str, Any]) -> str:
    instead = instead_of(key)
    if instead is not None:
        return instead
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4) or _same_leaf(key, known)
    return f"did you mean {near[0]}?" if near else "--help lists all keys"


def _in_words(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _inside_free_form(key: str, known: dict[str, Any]) -> bool:
    """Whether `key` lies inside a dict-valued field, whose keys are the user's own."""
    parents = (key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1))
    return any(typing.get_origin(known.get(parent)) is dict for parent in parents)


def _same_leaf(key: str, known: dict[str, Any]) -> list[str]:
    return [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]


def walk(cls: type, prefix: str = "", instance: Any = None) -> typing.Iterator[tuple[str, Any, Any, str]]:
    """All keys of a configuration class: ``(dotted key, type, default, docstring)``, depth first.

    `instance` holds the defaults where the class's own are not in force: a role may have others for a shared piece.
    """
    docs = _field_docs(cls)
    hints = typing.get_type_hints(cls)
    instance = cls() if instance is None else instance
    for field in dataclasses.fields(cls):
        kind, default = hints[field.name], getattr(instance, field.name)
        if dataclasses.is_dataclass(kind):
            yield from walk(typing.cast(type, kind), f"{prefix}{field.name}.", default)
        else:
            yield prefix + field.name, kind, default, docs.get(field.name, "")


@functools.cache
def _field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        [definition] = ast.parse(inspect.getsource(base)).body
        body = typing.cast(ast.ClassDef, definition).body
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = following.value if isinstance(following, ast.Expr) else None
                if isinstance(text, ast.Constant):
                    docs[statement.target.id] = " ".join(str(text.value).split())
    return docs


def help_text(cls: type, usage: str) -> str:
    """Every key with its default and meaning."""
    lines = [f"usage: {usage} [--config FILE] [--print-config] key=value ...", ""]
    for key, _, default, doc in walk(cls):
        lines.append(f"  {key}={'null' if default is None else default}")
        lines.append(f"      {doc}")
    return "\n".join(lines)


def parse_command_line(cls: type[T], usage: str, argv: list[str] | None = None) -> tuple[T, set[str]]:
    """`load_config` for a `main`: answers ``--help``, ``--print-config`` and ``--config FILE`` itself."""
    argv = sys.argv[1:] if argv is None else argv
    if any(a in ("-h", "--help") for a in argv):
        print(help_text(cls, usage))
        raise SystemExit(0)
    overrides, files = split_files([a for a in argv if a != "--print-config"])
    config, explicit = load_config(cls, overrides, files)
    if "--print-config" in argv:
        print(OmegaConf.to_yaml(OmegaConf.structured(config)), end="")
        raise SystemExit(0)
    return config, explicit
