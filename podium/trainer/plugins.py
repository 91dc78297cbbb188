"""A user's own methods, registered from outside the package (`trainer.plugins`)."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.utils.errors import UserError
from podium.utils.python_file import import_file, line_in

_KEY = "trainer.plugins"
_loaded: set[str] = set()


def load_plugins(plugins: Sequence[str]) -> tuple[str, ...]:
    """Imports each plug-in once a process: a Python file (``*.py``), or a module that Python finds by name.

    Returns:
        The same plug-ins, files by their whole path: what another process loads them by.

    Raises:
        UserError: a plug-in that is not there, or an error while it is imported.
    """
    resolved = tuple(str(Path(name).expanduser().resolve()) if name.endswith(".py") else name for name in plugins)
    for name in resolved:
        if name in _loaded:
            continue
        if name.endswith(".py"):
            import_file(Path(name), _KEY)
        else:
            _import_module(name)
        _loaded.add(name)
    return resolved


class PluggedName(str):
    """A name that plug-ins give a meaning: wherever it is unpickled, they are loaded first."""

    plugins: tuple[str, ...]

    def __new__(cls, name: str, plugins: Sequence[str]) -> "PluggedName":
        self = super().__new__(cls, name)
        self.plugins = load_plugins(plugins)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PluggedName, (str(self), self.plugins)


def _import_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise UserError(f"{_KEY}: importing {name} fails with ModuleNotFoundError: {error}") from error
        raise UserError(
            f"{_KEY}: there is no module {name}; give a file (path/to/{name.rsplit('.', 1)[-1]}.py), or put its folder "
            "on PYTHONPATH"
        ) from None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        spec = importlib.util.find_spec(name)
        where = line_in(error, Path(spec.origin)) if spec is not None and spec.origin else ""
        message = " ".join(str(error).split())
        raise UserError(f"{_KEY}: importing {name} fails{where} with {type(error).__name__}: {message}") from error
