#!/usr/bin/env bash
# PPO (arXiv 1707.06347): a critic gives each token its own baseline (GAE).
# Qwen2.5 0.5B on GSM8K, FSDP and vLLM. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    algorithm.adv_estimator=gae \
    algorithm.kl_ctrl.kl_coef=0.001 \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=16 \
    critic.fsdp_config.dtype=bfloat16 \
    critic.model.enable_gradient_checkpointing=true \
    trainer.default_local_dir="$RUNS/ppo" \
    "$@"
