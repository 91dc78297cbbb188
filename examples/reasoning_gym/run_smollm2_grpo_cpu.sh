#!/usr/bin/env bash
# GRPO on a real pretrained model, on a CPU: one-digit sums of reasoning_gym after two worked examples, 20
# steps. MODEL is any Hugging Face directory or hub name; further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
TASK=${TASK:-data/chain_sum}
RUNS=${RUNS:-runs/reasoning_gym}

[ -e "$TASK/val.parquet" ] || "$PYTHON" examples/data_preprocess/reasoning_gym_task.py --task chain_sum --out "$TASK" \
    --set min_terms=2 max_terms=2 min_digits=1 max_digits=1 --shots 2 --after ": "

"$PYTHON" -m podium.trainer.main_ppo \
    data.train_files="$TASK/train.parquet" \
    data.val_files="$TASK/val.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=32 \
    data.max_response_length=4 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.optim.weight_decay=0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=4 \
    algorithm.adv_estimator=grpo \
    custom_reward_function.path=examples/reasoning_gym/reward.py \
    trainer.total_training_steps=20 \
    trainer.backend=local \
    trainer.default_local_dir="$RUNS/smollm2-grpo" \
    "$@"
