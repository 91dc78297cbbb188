#!/usr/bin/env bash
# The methods of mine.py on the quickstart's task, on a CPU, in about two minutes. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh
warm_start

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    trainer.plugins=[recipes/write_your_own/mine.py] \
    algorithm.adv_estimator=group_median \
    actor_rollout_ref.actor.policy_loss.loss_mode=spo \
    custom_reward_function.path=recipes/write_your_own/mine.py \
    data.train_batch_size=32 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.rollout.n=8 \
    trainer.test_freq=10 \
    trainer.default_local_dir="$RUNS/write_your_own" \
    "$@"
