"""How a command line ends: exit codes and error lines. Light, so that a mistyped key is told at once."""

import sys
from collections.abc import Callable

from podium.utils.errors import UserError


def run_main(main: Callable[[], None]) -> None:
    """Runs a `main` and ends the process: 0 when done, 2 with one ``error:`` line for bad input, 130 on Ctrl-C."""
    try:
        main()
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
