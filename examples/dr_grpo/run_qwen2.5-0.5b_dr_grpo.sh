#!/usr/bin/env bash
# Dr.GRPO (arXiv 2503.20783): GRPO without its two biases: no division by the group's spread or by the response's length.
# Qwen2.5 0.5B on GSM8K, FSDP and vLLM. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=false \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    trainer.default_local_dir="$RUNS/dr_grpo" \
    "$@"
