#!/usr/bin/env bash
# RLOO (arXiv 2402.14740): each response is compared with the mean of the others to its prompt.
# On the quickstart's task, on a CPU, in about two minutes. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh
warm_start

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=32 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    algorithm.adv_estimator=rloo \
    actor_rollout_ref.rollout.n=8 \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.default_local_dir="$RUNS/rloo" \
    "$@"
