#!/usr/bin/env bash
# DAPO on the quickstart's task, on a CPU, in about two minutes. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh
warm_start

# Responses may have 12 tokens where 7 are enough: from the eighth on, each costs a fifth of a point.
"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=32 \
    data.max_response_length=12 \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=score \
    algorithm.filter_groups.max_num_gen_batches=20 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=5 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.test_freq=10 \
    trainer.default_local_dir="$RUNS/dapo_recipe" \
    "$@"
