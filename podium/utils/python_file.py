"""Importing a user's Python file that is no part of any package."""

import importlib.util
import sys
import traceback
import zlib
from pathlib import Path
from types import ModuleType

from podium.utils.errors import UserError


def import_file(file: Path, key: str) -> ModuleType:
    """Runs `file` as a module, anew at every call.

    Args:
        key: the configuration key that names the file, for error messages.

    Raises:
        UserError: no such file, or an error while it is imported (with its line).
    """
    if not file.is_file():
        raise UserError(f"{key}={file}: there is no such file")
    # Files of one name in two folders are two modules.
    module_name = f"podium_file_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{key}={file}: not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and typing look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        message = " ".join(str(error).split())
        raise UserError(
            f"{key}={file}: importing it fails{line_in(error, file)} with {type(error).__name__}: {message}"
        ) from error
    return module


def line_in(error: BaseException, file: Path) -> str:
    """`` at line N`` of `file`, where there is one."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f" at line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" at line {lines[-1]}" if lines else ""
