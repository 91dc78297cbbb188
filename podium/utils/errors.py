"""The one exception that means "your input is wrong", as opposed to "Podium is wrong"."""


class UserError(ValueError):
    """Bad input from the user: one line that names the key, file or row, what was expected, and what to do.

    Command lines print it as ``error: ...`` and exit with code 2, without a traceback.
    """
