#!/usr/bin/env bash
# ReMax (arXiv 2310.10505): one sampled response to a prompt, its baseline the reward of the greedy one.
# Qwen2.5 0.5B on GSM8K, FSDP and vLLM. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=1024 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    algorithm.adv_estimator=remax \
    actor_rollout_ref.rollout.n=1 \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.default_local_dir="$RUNS/remax" \
    "$@"
