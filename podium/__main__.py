"""``podium COMMAND ...``, also as ``python3 -m podium COMMAND ...``: tools beside the trainers."""

import difflib
import importlib
import sys

from podium.trainer.cli import run_main
from podium.utils.errors import UserError

COMMANDS = {
    "export": ("podium.trainer.export", "a Hugging Face directory from a checkpoint"),
    "replay": ("podium.trainer.replay", "compute a step of a run again, and compare every metric"),
    "reshard": ("podium.trainer.reshard", "what moving weights from a trainer's layout to a rollout's costs"),
}
"""Name -> module with a ``main(arguments)``, imported only when it is called, and its line of help."""


def main() -> None:
    """Runs the command that the command line names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: podium COMMAND [--help] ...\n")
        print("\n".join(f"  {command:10} {text}" for command, (_, text) in COMMANDS.items()))
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        raise UserError(f"podium {name}: there is no such command; {hint}")
    importlib.import_module(COMMANDS[name][0]).main(arguments)


def console() -> None:
    """The installed script ``podium``."""
    run_main(main)


if __name__ == "__main__":
    console()
