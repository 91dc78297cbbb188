#!/usr/bin/env bash
# The whole RLHF line on the quickstart's task (sort six digits), on two CPU cores: supervised fine-tuning, a reward model
# from preferences, PPO against that model, generation, evaluation by the true answers. The policy never sees a true score.
#
#   bash examples/rlhf_pipeline_cpu.sh            SEED=1 to try another; RUNS=folder to write elsewhere
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SEED=${SEED:-0}
RUNS=${RUNS:-runs/rlhf-seed$SEED}
export RUNS TASK="$RUNS/task"
source examples/quickstart/common.sh
began=$SECONDS
stage() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - began)); }

# responses MODEL PROMPTS OUTPUT N: sampled answers in a parquet file.
responses() {
    "$PYTHON" -m podium.trainer.main_generate \
        model.path="$1" data.path="$2" data.output_path="$3" rollout.n="$4" \
        data.max_prompt_length=7 data.max_response_length=7 data.batch_size=1024 \
        rollout.name=hf rollout.max_num_seqs=1024 trainer.seed="$SEED" trainer.backend=local
}

# true_score SAMPLES SCORED: the share of right answers.
true_score() {
    "$PYTHON" -m podium.trainer.main_eval data.path="$1" data.output_path="$2" \
        custom_reward_function.path=examples/quickstart/reward.py
}

rm -rf "$RUNS"
stage "the task: sort six digits, 291417= -> 112479"
"$PYTHON" examples/quickstart/make_task.py --out "$TASK" --seed "$SEED"

stage "supervised fine-tuning on answers of which three in eight are right"
examples/quickstart/sft.sh data.seed=$((SEED + 1))
SFT=$RUNS/sft/export

stage "preferences: what the fine-tuned model writes, judged"
responses "$SFT" "$TASK/train.parquet" "$RUNS/samples.parquet" 2
"$PYTHON" examples/rlhf/make_pairs.py "$RUNS/samples.parquet" --out "$RUNS/pairs" --seed "$SEED"

stage "reward model"
"$PYTHON" -m podium.trainer.main_rm \
    model.path="$SFT" \
    data.train_files="$RUNS/pairs/train.parquet" \
    data.val_files="$RUNS/pairs/val.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=7 \
    data.max_response_length=8 \
    data.seed=$((SEED + 1)) \
    optim.lr=1e-3 \
    optim.lr_warmup_steps=20 \
    optim.lr_scheduler_type=linear \
    optim.weight_decay=0 \
    trainer.total_training_steps=250 \
    trainer.log_freq=50 \
    trainer.test_freq=125 \
    trainer.backend=local \
    trainer.default_local_dir="$RUNS/rm"

# The KL holds the policy where the reward model has seen responses: beyond, it can be fooled. It has seen none that does
# not end: a seventh digit in place of the end would score higher than any answer, so length costs more than that gains.
stage "PPO against the reward model"
"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.max_response_length=8 \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=1 \
    reward_model.overlong_buffer.penalty_factor=10 \
    data.train_batch_size=256 \
    data.seed=$((SEED + 1)) \
    actor_rollout_ref.actor.optim.lr=6e-4 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=linear \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    algorithm.adv_estimator=gae \
    algorithm.kl_ctrl.kl_coef=0.3 \
    critic.ppo_mini_batch_size=256 \
    critic.optim.lr=1e-3 \
    critic.optim.weight_decay=0 \
    critic.cliprange_value=null \
    reward_model.enable=true \
    reward_model.model.path="$RUNS/rm/export" \
    reward_model.function_weight=0 \
    actor_rollout_ref.rollout.name=hf \
    trainer.backend=local \
    trainer.critic_warmup=3 \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$RUNS/ppo"

for model in sft ppo; do
    stage "generation and evaluation: $model"
    responses "$RUNS/$model/export" "$TASK/val.parquet" "$RUNS/samples_$model.parquet" 4
    true_score "$RUNS/samples_$model.parquet" "$RUNS/scored_$model.parquet"
done

stage "what came of it"
"$PYTHON" examples/rlhf/report.py "$RUNS"
echo "total time: $((SECONDS - began)) s"
