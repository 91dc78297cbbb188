"""Running untrusted Python in a process that can harm little."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from podium.utils.errors import UserError
from podium.workers.reward.builtin import sandbox_main

_MEMORY_MB, _FILE_MB = 1024, 16
_SHOWN = 2000


@dataclass(frozen=True)
class Run:
    """What became of a program."""

    finished: bool
    """It came to its end by itself, without an error."""
    output: str
    error: str
    """The end of what it wrote to standard error, or that it was late."""


def run_python(program: str, tests: str = "", stdin: str = "", time_limit_s: float = 5.0) -> Run:
    """Runs `program`, then `tests` with its names, in a temporary folder.

    The process has no network, starts no other, sends no signals, and is killed after `time_limit_s`; it may have 1 GiB
    of memory and write files of 16 MiB. It has none of this process's environment. What it may still do is read and
    write files as this user: where that matters, run the trainer in a container.

    Raises:
        UserError: this system has no seccomp filters.
    """
    with tempfile.TemporaryDirectory(prefix="podium_code_", ignore_cleanup_errors=True) as name:
        folder, token = Path(name), secrets.token_hex(16)
        (folder / "program.py").write_text(program, encoding="utf-8")
        (folder / "tests.py").write_text(tests, encoding="utf-8")
        limits = [str(int(time_limit_s) + 1), str(_MEMORY_MB), str(_FILE_MB)]
        with (folder / "out").open("w+b") as out, (folder / "err").open("w+b") as err:
            process = subprocess.Popen(
                [sys.executable, "-I", sandbox_main.__file__, name, token, *limits],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env={"PATH": os.defpath, "HOME": name, "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
            try:
                process.communicate(stdin.encode(), timeout=time_limit_s)
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.returncode == sandbox_main.REFUSED:
                raise UserError("the reward for code needs seccomp filters, which this system does not have")
            done = folder / "done"
            is_ours = done.is_file() and not done.is_symlink()
            finished = not late and is_ours and done.read_text(encoding="utf-8", errors="replace") == token
            error = f"no result in {time_limit_s:g} s" if late else _read(err)[-_SHOWN:]
            return Run(finished, _read(out), error)


def _read(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
