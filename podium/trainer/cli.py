"""How a command line ends: exit codes and error lines. Light, so that a mistyped key is told at once."""

import sys
from collections.abc import Callable

from podium.trainer.preemption import EXIT_CODE, Preempted
from podium.utils.errors import UserError
from podium.utils.redact import redact_arguments


def run_main(main: Callable[[], None]) -> None:
    """Runs a `main` and ends the process.

    Exit code 0: done. 1: a fault, with its traceback. 2: bad input, with one ``error:`` line, secrets left out. 130:
    Ctrl-C. 143: SIGTERM, with a line that says which step the run goes on from.
    """
    try:
        main()
    except UserError as error:
        print("error:", redact_arguments(" ".join(str(error).split())), file=sys.stderr)
        raise SystemExit(2) from None
    except Preempted as end:
        print(end, file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
