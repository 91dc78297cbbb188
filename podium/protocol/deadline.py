"""How long a call to the workers may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podium.protocol.errors import WorkerTimeout

START = "__init__"
"""Under this name a group's deadlines have that of its start: processes, and the constructors of its roles."""


@dataclass(frozen=True)
class Deadline:
    """A limit, and what to say when it passes."""

    seconds: float | None
    """None: no limit."""
    phase: str = ""
    """What the workers do meanwhile."""
    key: str = ""
    """The configuration key that says how long."""

    def explain(self, error: WorkerTimeout) -> WorkerTimeout:
        """The error, with phase and key in its message."""
        if not self.phase:
            return error
        told = type(error)(f"{error} (phase {self.phase}; if it only needs longer, raise {self.key})")
        told.__dict__.update(error.__dict__, phase=self.phase)
        return told


NO_DEADLINE = Deadline(None)

Deadlines = Mapping[str, Deadline]
"""By method, for those that do not have the group's ``timeout_s``."""


def deadline_of(method: str, deadlines: Deadlines, timeout_s: float | None) -> Deadline:
    """A method's own deadline, or that of any call."""
    return deadlines.get(method) or Deadline(timeout_s)
