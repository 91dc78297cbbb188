"""A plug-in that kills the process it is loaded in, as ``kill -9`` would: at the place and step in PODIUM_TEST_KILL."""

import os
import signal
import sys
from typing import Any

PLACES = ("begin", "update", "save", "end", "commit", "mark")


def install() -> None:
    place, step = os.environ["PODIUM_TEST_KILL"].split(":")
    assert place in PLACES, place

    from podium.trainer import checkpoint
    from podium.trainer.ppo.trainer import PPOTrainer
    from podium.trainer.sft.trainer import SFTTrainer

    def before(owner: Any, name: str, step_here: Any) -> None:
        original = getattr(owner, name)

        def killed(*args: Any, **kwargs: Any) -> Any:
            if step_here(*args) == int(step):
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, killed)

    if place == "begin":  # between two steps
        before(PPOTrainer, "begin_step", lambda loop: loop.step + 1)
    if place == "update":  # the data are drawn, the weights are not updated
        before(PPOTrainer, "update", lambda loop, *_: loop.step)
        before(SFTTrainer, "validate", lambda loop, *_: loop.step)
    if place == "save":  # the weights are updated, nothing is saved
        before(PPOTrainer, "save", lambda loop: loop.step)
        before(SFTTrainer, "save", lambda loop, *_: loop.step)
    if place == "end":  # written beside; the step has no line yet
        before(PPOTrainer, "end_step", lambda loop, _: loop.step)
    if place == "commit":  # the step has its line; the checkpoint is not in its place
        before(checkpoint, "publish", lambda _, final: int(final.name.removeprefix("global_step_")))
    if place == "mark":  # in its place, and not marked
        before(checkpoint, "mark", lambda _, at: at)


if os.environ.get("PODIUM_TEST_KILL"):
    install()
