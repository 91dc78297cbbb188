#!/usr/bin/env bash
# GRPO (arXiv 2402.03300): eight responses to a prompt, each compared with their mean; no critic.
# On the quickstart's task, on a CPU, in about two minutes. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh
warm_start

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=32 \
    actor_rollout_ref.actor.optim.lr=4e-4 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=linear \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    trainer.total_training_steps=90 \
    trainer.default_local_dir="$RUNS/grpo" \
    "$@"
