#!/usr/bin/env bash
# PPO with actor, critic and reference on Megatron, split over two processes by tensor parallel.
# On the quickstart's task, on a CPU; for pipeline parallel:
#     run_megatron_cpu.sh actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1 \
#         actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

exec examples/ppo/run_ppo_cpu.sh \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    critic.strategy=megatron \
    trainer.n_gpus_per_node=2 \
    trainer.default_local_dir="${RUNS:-runs/sort6}/megatron" \
    "$@"
