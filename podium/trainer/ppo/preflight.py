"""What can be found out about the chosen methods before any worker starts, with the heavy imports at hand."""

from collections.abc import Iterable

import torch

from podium.trainer.config.ppo import PPOConfig
from podium.trainer.ppo.dynamic_sampling import METRICS
from podium.trainer.ppo.registry import unknown_name
from podium.trainer.ppo.rollout_correction import compute_rollout_correction
from podium.utils.dataset import PromptDataset
from podium.workers.reward.manager import RewardManager
from podium.workers.weight_sync.transport import get_transport


def check_rollout_correction(config: PPOConfig) -> None:
    """Tries the correction on one token.

    Raises:
        UserError: an unknown name, or a threshold that is none.
    """
    correction, token = config.algorithm.rollout_correction, torch.zeros(1, 1)
    compute_rollout_correction(
        token,
        token,
        torch.ones(1, 1),
        correction.rollout_is,
        correction.rollout_is_threshold,
        correction.rollout_is_batch_normalize,
        correction.rollout_rs,
        correction.rollout_rs_threshold,
    )


def check_rewards(config: PPOConfig, reward: RewardManager, datasets: Iterable[PromptDataset]) -> None:
    """Scores one row of each data source, and compares the keys that come back with those that methods read.

    Raises:
        UserError: a reward function that does not work on a row (named by its file), or returns too little.
    """
    try:
        for dataset in datasets:
            for column in ("data_source", "reward_model"):
                if column not in dataset.columns:
                    print(f"data  {dataset.where(0)}: no column '{column}'; reward functions get None for it")
            for item in dataset.first_of_each_source().values():
                check_reward_keys(config, reward.check(dataset[item], dataset.where(item)).extra)
    except BaseException:
        reward.close()
        raise


def check_transport(config: PPOConfig) -> None:
    """Looks the weight-sync transport up, once plug-ins have been loaded.

    Raises:
        UserError: there is none of that name.
    """
    name = config.actor_rollout_ref.rollout.weight_sync.transport
    if name != "auto":
        get_transport(name)


def check_reward_keys(config: PPOConfig, returned: Iterable[str]) -> None:
    """Compares the keys that methods read with those that the reward function returned for a row of the data.

    Raises:
        UserError: a key that is not there, with the nearest one.
    """
    algorithm, returned = config.algorithm, list(returned)
    if algorithm.adv_estimator == "gdpo":
        for key in algorithm.gdpo_reward_keys:
            if key not in returned:
                raise unknown_name("algorithm.gdpo_reward_keys entry", key, returned)
    metric = algorithm.filter_groups.metric
    if algorithm.filter_groups.enable and metric not in (*METRICS, *returned):
        raise unknown_name("algorithm.filter_groups.metric", metric, [*METRICS, *returned])
