"""From the configuration to the scorer that it describes."""

from typing import Any

from podium.workers.reward.functions import ARGUMENTS, BATCH_ARGUMENTS, RewardSource
from podium.workers.reward.outcome import Scorer
from podium.workers.reward.pool import ProcessPool, default_num_processes
from podium.workers.reward.process_main import Job
from podium.workers.reward.scorers import BatchScorer, RowScorer


def build_scorer(reward_model: Any, function: Any) -> Scorer:
    """The scorer of ``reward_model.reward_manager``. Nothing is imported or started yet.

    Args:
        reward_model: has ``reward_manager``, ``num_workers``, ``timeout_s``, ``memory_limit_mb``, ``max_retries``,
            ``max_concurrency``.
        function: has ``path``, ``name``, ``reward_kwargs``.
    """
    batch = reward_model.reward_manager == "batch"
    arguments = BATCH_ARGUMENTS if batch else ARGUMENTS
    source = RewardSource(function.path, function.name, dict(function.reward_kwargs), arguments)
    job = Job(source, "batch" if batch else "row", reward_model.timeout_s, reward_model.max_retries)
    processes = reward_model.num_workers or default_num_processes()
    pool = ProcessPool(job, processes, reward_model.memory_limit_mb, reward_model.max_concurrency)
    return BatchScorer(pool, str(source)) if batch else RowScorer(pool, str(source))
