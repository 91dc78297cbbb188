#!/usr/bin/env bash
# DAPO (arXiv 2503.14476): dynamic sampling, clip-higher, token-mean and a soft penalty for length; no KL.
# On the quickstart's task, on a CPU, in about two minutes. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh
warm_start

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=32 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    data.max_response_length=12 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.max_num_gen_batches=10 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=5 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.default_local_dir="$RUNS/dapo" \
    "$@"
