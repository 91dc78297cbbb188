#!/usr/bin/env bash
# PPO on LoRA adapters (arXiv 2106.09685): the frozen policy is its own reference, and the critic has adapters too.
# On the quickstart's task, on a CPU, in about two minutes. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh
warm_start

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=256 \
    actor_rollout_ref.model.lora_rank=16 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.actor.optim.lr=3e-3 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=linear \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    algorithm.adv_estimator=gae \
    algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.rollout.n=1 \
    critic.ppo_mini_batch_size=256 \
    critic.model.lora_rank=16 \
    critic.model.lora_alpha=32 \
    critic.optim.lr=3e-3 \
    critic.optim.weight_decay=0 \
    trainer.critic_warmup=3 \
    trainer.default_local_dir="$RUNS/lora" \
    "$@"
