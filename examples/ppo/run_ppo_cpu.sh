#!/usr/bin/env bash
# PPO (arXiv 1707.06347): a critic gives each token its own baseline (GAE).
# On the quickstart's task, on a CPU, in about two minutes. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh
warm_start

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=256 \
    actor_rollout_ref.actor.optim.lr=6e-4 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=linear \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    algorithm.adv_estimator=gae \
    algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.rollout.n=1 \
    critic.ppo_mini_batch_size=256 \
    critic.optim.lr=1e-3 \
    critic.optim.weight_decay=0 \
    trainer.critic_warmup=3 \
    trainer.default_local_dir="$RUNS/ppo" \
    "$@"
