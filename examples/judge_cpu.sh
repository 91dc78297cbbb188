#!/usr/bin/env bash
# GRPO against a judge, on two CPU cores: a language model that is shown a prompt of the quickstart's task, a response and
# the right answer, and writes 1 or 0. It is fine-tuned here, on pairs as examples/rlhf_pipeline_cpu.sh makes them; a judge
# of your own needs the last command alone. The true score is reported and not trained on. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/quickstart/common.sh
warm_start

JUDGE=$RUNS/judge
if [ ! -e "$JUDGE/export/config.json" ]; then
    "$PYTHON" -m podium.trainer.main_generate \
        model.path="$RUNS/sft/export" data.path="$TASK/train.parquet" data.output_path="$JUDGE/samples.parquet" \
        data.max_prompt_length=7 data.max_response_length=7 data.batch_size=1024 \
        rollout.n=2 rollout.name=hf rollout.max_num_seqs=1024 trainer.backend=local
    "$PYTHON" examples/rlhf/make_pairs.py "$JUDGE/samples.parquet" --out "$JUDGE/pairs"
    "$PYTHON" examples/judge/make_verdicts.py "$JUDGE/pairs" --out "$JUDGE/verdicts"
    "$PYTHON" -m podium.trainer.main_sft \
        model.path="$RUNS/sft/export" \
        data.train_files="$JUDGE/verdicts/train.parquet" \
        data.val_files="$JUDGE/verdicts/val.parquet" \
        data.train_batch_size=256 \
        data.max_prompt_length=24 \
        data.max_response_length=2 \
        optim.lr=1e-3 \
        optim.lr_warmup_steps=20 \
        optim.lr_scheduler_type=linear \
        optim.weight_decay=0 \
        trainer.total_training_steps=300 \
        trainer.log_freq=50 \
        trainer.test_freq=100 \
        trainer.backend=local \
        trainer.default_local_dir="$JUDGE"
fi

"$PYTHON" -m podium.trainer.main_ppo "${COMMON[@]}" \
    data.train_batch_size=32 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    algorithm.adv_estimator=grpo \
    reward_model.enable=true \
    reward_model.style=generative \
    reward_model.model.path="$JUDGE/export" \
    reward_model.rollout.name=hf \
    reward_model.judge.template=examples/judge/sort.jinja \
    "reward_model.judge.verdict='^([01])'" \
    reward_model.judge.score_range=[0,1] \
    reward_model.judge.max_prompt_length=24 \
    reward_model.judge.max_response_length=2 \
    reward_model.function_weight=0 \
    trainer.backend=local \
    trainer.default_local_dir="$RUNS/grpo-judge" \
    "$@"
