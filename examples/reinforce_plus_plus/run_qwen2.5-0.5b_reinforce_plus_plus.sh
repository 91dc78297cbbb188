#!/usr/bin/env bash
# REINFORCE++ (arXiv 2501.03262): one response to a prompt, rewards whitened over the batch; no critic, no groups.
# Qwen2.5 0.5B on GSM8K, FSDP and vLLM. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=1024 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    algorithm.adv_estimator=reinforce_plus_plus \
    actor_rollout_ref.rollout.n=1 \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.default_local_dir="$RUNS/reinforce_plus_plus" \
    "$@"
