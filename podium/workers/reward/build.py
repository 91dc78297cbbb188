"""From the configuration to the scorer that it describes."""

from typing import Any

from podium.utils.redact import redact_text, secret_values
from podium.workers.reward.functions import ARGUMENTS, BATCH_ARGUMENTS, RewardSource
from podium.workers.reward.outcome import Scorer
from podium.workers.reward.pool import ProcessPool, default_num_processes
from podium.workers.reward.process_main import Job, Source
from podium.workers.reward.remote import RemoteSource
from podium.workers.reward.scorers import BatchScorer, RowScorer
from podium.workers.reward.weighted_sum import summed_source


def build_scorer(reward_model: Any, function: Any) -> Scorer:
    """The scorer of ``reward_model.reward_manager``. Nothing is imported or started yet.

    Args:
        reward_model: has ``reward_manager``, ``num_workers``, ``timeout_s``, ``memory_limit_mb``, ``max_retries``,
            ``max_concurrency``, ``url``, ``rate_limit``.
        function: has ``path``, ``name``, ``reward_kwargs``, ``sources``.

    Raises:
        UserError: a part of ``sources`` that says what no part can.
    """
    batch, remote = reward_model.reward_manager == "batch", reward_model.reward_manager == "remote"
    source: Source
    if remote:
        source = RemoteSource(reward_model.url, reward_model.rate_limit)
    elif function.sources:
        source = summed_source(function.sources)
    else:
        arguments = BATCH_ARGUMENTS if batch else ARGUMENTS
        source = RewardSource(function.path, function.name, dict(function.reward_kwargs), arguments)
    job = Job(source, "batch" if batch else "row", reward_model.timeout_s, reward_model.max_retries)
    processes = 1 if remote else reward_model.num_workers or default_num_processes()
    secrets = secret_values([function.reward_kwargs, function.sources])
    pool = ProcessPool(job, processes, reward_model.memory_limit_mb, reward_model.max_concurrency, secrets)
    name = redact_text(str(source))
    return BatchScorer(pool, name) if batch else RowScorer(pool, name)
