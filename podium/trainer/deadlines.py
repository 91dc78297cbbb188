"""Which call to the workers may take how long, and which key says so."""

from typing import Any

from podium.protocol.deadline import START, Deadline

_FORWARDS = ("compute_log_prob", "compute_ref_log_prob", "compute_values", "compute_rm_score")
_UPDATES = ("update_actor", "update_critic", "update_reward_model")
# A phase takes over the methods that one before it has, where the configuration has both.
_METHODS: dict[str, tuple[str, ...]] = {
    "init": (START, "init_model", "load_own_weights"),
    "generate": ("generate_sequences", "begin_sequences", "finished_sequences", "sleep"),
    "forward": _FORWARDS,
    "score": ("compute_rm_score",),
    "update": _UPDATES,
    "save": ("save_checkpoint", "saved_files", "end_saving", "load_checkpoint", "save_hf"),
}
_SYNC = ("sync_endpoint", "connect_sync", "sync_weights")
# The ends of a sync keep its deadline themselves, and say more when it passes: they come first.
_SYNC_GRACE_S = 60.0


def call_deadlines(trainer: Any, rollout: Any = None) -> dict[str, Deadline]:
    """Deadlines by method.

    Args:
        trainer: has ``rpc_timeout_s`` and ``deadlines``.
        rollout: has ``weight_sync``; None where weights are not synced.
    """
    deadlines: dict[str, Deadline] = {}
    for phase, methods in _METHODS.items():
        name = f"{phase}_s"
        if not hasattr(trainer.deadlines, name):
            continue
        seconds = getattr(trainer.deadlines, name)
        limit = Deadline(trainer.rpc_timeout_s if seconds is None else seconds, phase, f"trainer.deadlines.{name}")
        deadlines.update(dict.fromkeys(methods, limit))
    if rollout is not None:
        key = "actor_rollout_ref.rollout.weight_sync.timeout_s"
        limit = Deadline(rollout.weight_sync.timeout_s + _SYNC_GRACE_S, "sync", key)
        deadlines.update(dict.fromkeys(_SYNC, limit))
    return deadlines


def phase_of(method: str) -> str:
    """What the workers do in a method; empty for one that is over at once."""
    phases = [phase for phase, methods in _METHODS.items() if method in methods]
    return phases[-1] if phases else "sync" if method in _SYNC else ""


def longest(trainer: Any, deadlines: dict[str, Deadline]) -> float:
    """Seconds: workers that wait for each other do so at least as long as the driver waits for them."""
    return max([trainer.rpc_timeout_s, *(limit.seconds or 0.0 for limit in deadlines.values())])
