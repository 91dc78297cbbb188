"""The command ``podium``: it finds its commands, and says what is wrong in one line."""

import subprocess
import sys

import pytest

from podium.__main__ import COMMANDS


def podium(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "podium", *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_the_commands(arguments):
    result = podium(*arguments)
    assert result.returncode == 0
    assert all(f"  {name} " in result.stdout for name in COMMANDS)


def test_a_command_that_does_not_exist_is_told_the_nearest():
    result = podium("reshrad")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: podium reshrad: there is no such command; did you mean reshard?\n"
