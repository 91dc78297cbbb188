#!/usr/bin/env bash
# DAPO's settings (arXiv 2503.14476, section 4.1) for a 7B model on a mathematics data set, on one or more 8-GPU machines.
#
# DATA: a folder with train.parquet and test.parquet in verl's columns. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DATA=${DATA:-data/dapo_math}
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=512 \
    data.max_prompt_length=2048 \
    data.max_response_length=20480 \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=score \
    algorithm.filter_groups.max_num_gen_batches=10 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=20 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=4096 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.default_local_dir="$RUNS/dapo_7b" \
    "$@"
