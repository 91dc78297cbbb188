#!/usr/bin/env bash
# Warm start: fits the fresh model to answers of which three in eight are right. Further key=value arguments win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/quickstart/common.sh

"$PYTHON" -m podium.trainer.main_sft \
    model.path="$TASK/model" \
    data.train_files="$TASK/sft_train.parquet" \
    data.val_files="$TASK/sft_val.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=7 \
    data.max_response_length=7 \
    optim.lr=1e-3 \
    optim.lr_warmup_steps=50 \
    optim.weight_decay=0 \
    optim.lr_scheduler_type=linear \
    trainer.total_training_steps=360 \
    trainer.log_freq=60 \
    trainer.test_freq=120 \
    trainer.backend=local \
    trainer.default_local_dir="$RUNS/sft" \
    "$@"
