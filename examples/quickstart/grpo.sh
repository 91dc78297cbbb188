#!/usr/bin/env bash
# GRPO: eight responses a prompt, compared with each other; no critic. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh

"$PYTHON" -m podium.trainer.main_ppo \
    data.train_files="$TASK/train.parquet" \
    data.val_files="$TASK/val.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=7 \
    data.max_response_length=7 \
    actor_rollout_ref.model.path="$RUNS/sft/export" \
    actor_rollout_ref.actor.optim.lr=2e-4 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.optim.weight_decay=0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    algorithm.adv_estimator=grpo \
    custom_reward_function.path=examples/quickstart/reward.py \
    custom_reward_function.name=compute_score \
    trainer.total_training_steps=60 \
    trainer.test_freq=20 \
    trainer.save_freq=30 \
    trainer.default_local_dir="$RUNS/grpo" \
    "$@"
