"""What to lower when a worker has run out of memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from podium.protocol import WorkerError
from podium.trainer.deadlines import phase_of
from podium.utils.errors import UserError

PPO_KEYS = {
    "actor": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor.compute_log_prob": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "critic": "critic.ppo_micro_batch_size_per_gpu",
    "ref": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "reward_model": "reward_model.micro_batch_size_per_gpu",
    "reward_model.generate_sequences": "reward_model.rollout.max_num_seqs",
    "rollout": "actor_rollout_ref.rollout.max_num_seqs",
}
"""By role, or role and method, the key that says how much of a batch is computed together."""


@contextmanager
def naming_keys(size_keys: Mapping[str, str], length_key: str) -> Iterator[None]:
    """Turns a worker's want of memory into bad input: where it was, for what, and the two keys to lower.

    Args:
        size_keys: as `PPO_KEYS`.
        length_key: of the tokens of a row.

    Raises:
        UserError: a worker has run out of memory.
    """
    try:
        yield
    except WorkerError as error:
        if error.out_of_memory is None:
            raise
        key = size_keys.get(f"{error.role}.{error.method}") or size_keys.get(error.role)
        phase = phase_of(error.method) or error.method
        if phase == "init" or key is None:
            hint = "more ranks (trainer.n_gpus_per_node), a smaller model or bfloat16 take less on each"
        else:
            hint = f"lower {key} or {length_key}"
        what = error.out_of_memory or "what was not a micro-batch"
        raise UserError(
            f"out of memory in {error.role}.{error.method} on rank {error.rank} (phase {phase}), for {what}: {hint}"
        ) from error
