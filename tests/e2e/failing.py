"""A plug-in: PPO's loss, which in one rank and one call does what PODIUM_TEST_FAULT says, once for a marker file."""

import gc
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from podium.trainer.ppo.losses import register_policy_loss
from podium.trainer.ppo.policy_losses import compute_policy_loss_vanilla

_calls = 0


def _is_time(call: int, rank: int) -> bool:
    marker = Path(os.environ["PODIUM_TEST_MARKER"])
    if _calls != call or os.environ.get("RANK", "0") != str(rank) or marker.exists():
        return False
    marker.touch()
    return True


def _ask_for_too_much() -> None:
    """Has the allocator refuse 64 GB: the process may have 8 GB of addresses more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30), before[1]))
    try:
        torch.empty(64 << 30, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _poison_a_weight() -> None:
    """What a fault of the memory may do: numbers of the policy's first parameter are NaN, where it is in this rank."""
    for thing in gc.get_objects():
        if isinstance(thing, torch.nn.Module) and (hasattr(thing, "lm_head") or type(thing).__name__ == "GPTModel"):
            weight = next(thing.parameters())
            shard = weight.to_local() if isinstance(weight, DTensor) else weight
            shard.detach().view(-1)[:64] = float("nan")


@register_policy_loss("failing")
def failing(*args: Any, **kwargs: Any) -> Any:
    """``nan:CALL``, ``nan:always``, ``memory:CALL``, ``sleep:CALL``, ``poison:CALL``, ``term:CALL``,
    ``termsleep:CALL``; in rank 1, ``kill:CALL``, ``stop:CALL``, ``raise:CALL``."""
    global _calls
    _calls += 1
    loss, metrics = compute_policy_loss_vanilla(*args, **kwargs)
    what, when = os.environ.get("PODIUM_TEST_FAULT", "none:0").split(":")
    if what == "nan" and (when == "always" or _calls == int(when)):
        return loss * float("nan"), metrics
    if what == "memory" and _calls == int(when):
        _ask_for_too_much()
    if what == "poison" and _is_time(int(when), 0):
        _poison_a_weight()
    if what.startswith("term") and _is_time(int(when), 0):
        os.kill(os.getpid(), signal.SIGTERM)
    if what.endswith("sleep") and _calls == int(when):
        time.sleep(600)
    if what in ("kill", "stop", "raise") and _is_time(int(when), 1):
        if what == "raise":
            raise RuntimeError("this rank fails alone")
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    return loss, metrics
