#!/usr/bin/env bash
# PPO with actor, critic and reference on Megatron: tensor and pipeline parallel, two interleaved pieces a stage.
# Qwen2.5 0.5B on GSM8K, four GPUs a copy of the model, vLLM on each GPU. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PRECISION=actor_rollout_ref.actor.megatron.dtype=bfloat16
source examples/gsm8k/common.sh

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.sequence_parallel=true \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.use_remove_padding=true \
    algorithm.adv_estimator=gae \
    algorithm.kl_ctrl.kl_coef=0.001 \
    critic.strategy=megatron \
    critic.optim.lr=1e-5 \
    critic.model.enable_gradient_checkpointing=true \
    trainer.default_local_dir="$RUNS/megatron" \
    "$@"
