# What the scripts that train on the quickstart's task share. TASK: made by make_task.py; RUNS: where runs are written.
PYTHON=${PYTHON:-.venv/bin/python}
TASK=${TASK:-data/sort6}
RUNS=${RUNS:-runs/sort6}

# The keys of the examples' CPU scripts that no algorithm changes.
COMMON=(
    data.train_files="$TASK/train.parquet"
    data.val_files="$TASK/val.parquet"
    data.max_prompt_length=7
    data.max_response_length=7
    actor_rollout_ref.model.path="$RUNS/sft/export"
    actor_rollout_ref.actor.optim.lr=2e-4
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.optim.betas=[0.9,0.95]
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256
    actor_rollout_ref.rollout.name=vllm
    custom_reward_function.path=examples/quickstart/reward.py
    trainer.total_training_steps=60
    trainer.test_freq=20
    trainer.save_freq=30
)

# Makes the task and the model to start from, where they are not there yet: about a minute and a half.
warm_start() {
    [ -e "$TASK/val.parquet" ] || "$PYTHON" examples/quickstart/make_task.py --out "$TASK"
    [ -e "$RUNS/sft/export/config.json" ] || examples/quickstart/sft.sh
}
