"""A plug-in: PPO's loss, which in one rank and one call does what PODIUM_TEST_FAULT says, once for a marker file."""

import os
import signal
from pathlib import Path
from typing import Any

from podium.trainer.ppo.losses import register_policy_loss
from podium.trainer.ppo.policy_losses import compute_policy_loss_vanilla

_calls = 0


def _is_time(call: int, rank: int) -> bool:
    marker = Path(os.environ["PODIUM_TEST_MARKER"])
    if _calls != call or os.environ.get("RANK", "0") != str(rank) or marker.exists():
        return False
    marker.touch()
    return True


@register_policy_loss("failing")
def failing(*args: Any, **kwargs: Any) -> Any:
    """``nan:CALL``, ``nan:always``, ``kill:CALL``, ``stop:CALL``, ``raise:CALL``; the last three in rank 1."""
    global _calls
    _calls += 1
    loss, metrics = compute_policy_loss_vanilla(*args, **kwargs)
    what, when = os.environ.get("PODIUM_TEST_FAULT", "none:0").split(":")
    if what == "nan" and (when == "always" or _calls == int(when)):
        return loss * float("nan"), metrics
    if what in ("kill", "stop", "raise") and _is_time(int(when), 1):
        if what == "raise":
            raise RuntimeError("this rank fails alone")
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    return loss, metrics
