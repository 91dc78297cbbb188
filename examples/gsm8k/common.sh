# What the GPU scripts share: Qwen2.5 0.5B on GSM8K, trained by FSDP, sampled by vLLM, on the GPUs of one machine.
#
# DATA: a folder with GSM8K's train.parquet and test.parquet in verl's columns (a chat prompt, reward_model.ground_truth).
# Larger models: MODEL=Qwen/Qwen2.5-7B-Instruct, and a smaller ppo_micro_batch_size_per_gpu. More machines: NNODES, with
# RAY_ADDRESS of a running Ray cluster.
PYTHON=${PYTHON:-.venv/bin/python}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-data/gsm8k}
RUNS=${RUNS:-runs/gsm8k}
GPUS=${GPUS:-8}
NNODES=${NNODES:-1}

COMMON=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=512
    data.max_response_length=1024
    data.filter_overlong_prompts=true
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
    "${PRECISION:-actor_rollout_ref.actor.fsdp_config.dtype=bfloat16}"
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.dtype=bfloat16
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.enforce_eager=false
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    custom_reward_function.path=examples/gsm8k/reward.py
    trainer.n_gpus_per_node="$GPUS"
    trainer.nnodes="$NNODES"
    trainer.total_epochs=15
    trainer.test_freq=10
    trainer.save_freq=50
)
