#!/usr/bin/env bash
# GRPO (arXiv 2402.03300): eight responses to a prompt, each compared with their mean; no critic.
# Qwen2.5 0.5B on GSM8K, FSDP and vLLM. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    trainer.default_local_dir="$RUNS/grpo" \
    "$@"
