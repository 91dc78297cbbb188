#!/usr/bin/env bash
# GSPO (arXiv 2507.18071): GRPO's advantages, with one ratio a response, its geometric mean, and a narrow clip on it.
# Qwen2.5 0.5B on GSM8K, FSDP and vLLM. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 \
    actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    trainer.default_local_dir="$RUNS/gspo" \
    "$@"
