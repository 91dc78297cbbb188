#!/usr/bin/env bash
# RLOO (arXiv 2402.14740): each response is compared with the mean of the others to its prompt.
# Qwen2.5 0.5B on GSM8K, FSDP and vLLM. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    algorithm.adv_estimator=rloo \
    actor_rollout_ref.rollout.n=8 \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.default_local_dir="$RUNS/rloo" \
    "$@"
