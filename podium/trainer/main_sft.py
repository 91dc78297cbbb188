"""Supervised fine-tuning: ``python3 -m podium.trainer.main_sft key=value ...`` (``--help`` lists the keys)."""

import dataclasses
from typing import Any

from podium.trainer.cli import run_main
from podium.trainer.config import SFTConfig, check_sft_config, parse_command_line
from podium.utils.errors import UserError


def main() -> None:
    """Reads the command line and trains."""
    config, explicit = parse_command_line(SFTConfig, "python3 -m podium.trainer.main_sft")
    check_sft_config(config, explicit)
    train(config)


def train(config: SFTConfig) -> dict[str, float]:
    """Fine-tunes as configured. Returns the last validation's metrics.

    Raises:
        UserError: bad input.
    """
    from podium.models.hf import load_hf_config
    from podium.protocol import ClassWithInitArgs
    from podium.trainer.launch import resolve_device, worker_groups
    from podium.trainer.sft.objective import sft_objective
    from podium.trainer.sft.trainer import SFTTrainer
    from podium.utils.tokenizer import load_tokenizer
    from podium.utils.tracking import Tracking, check_loggers, make_run_dir
    from podium.workers.actor import ActorWorker

    data, trainer = config.data, config.trainer
    check_loggers(trainer.logger)
    device = resolve_device(trainer.device)
    load_hf_config(config.model.path, "model.path", config.model.trust_remote_code)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    train_set = _dataset(config, tokenizer, "train_files")
    val_set = _dataset(config, tokenizer, "val_files") if data.val_files else None
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    if data.train_batch_size % ranks:
        raise UserError(
            f"data.train_batch_size={data.train_batch_size} does not divide over {ranks} ranks: "
            f"{data.train_batch_size / ranks:.2f}"
        )
    if len(train_set) < data.train_batch_size:
        raise UserError(
            f"data.train_batch_size={data.train_batch_size}, but data.train_files has {len(train_set)} rows"
        )
    rows = data.train_batch_size // ranks
    micro = data.micro_batch_size_per_gpu or rows
    total_steps = trainer.total_training_steps or len(train_set) // data.train_batch_size * trainer.total_epochs
    make_run_dir(trainer.default_local_dir)
    print(f"data  train: {train_set.report}" + (f"; validation: {val_set.report}" if val_set is not None else ""))
    print(
        f"plan  {ranks} rank(s), {total_steps} steps of {data.train_batch_size} rows, micro-batch {micro}", flush=True
    )
    actor = ClassWithInitArgs(
        ActorWorker,
        config.model,
        config,
        sft_objective,
        mini_batch_rows=rows,
        micro_batch_rows=micro,
        infer_rows=micro,
        total_steps=total_steps,
    )
    with worker_groups(trainer, device, {"actor": actor}, "sft") as groups:
        groups["actor"].init_model()
        with Tracking(
            trainer.logger,
            trainer.default_local_dir,
            trainer.project_name,
            trainer.experiment_name,
            dataclasses.asdict(config),
            total_steps,
        ) as tracking:
            return SFTTrainer(config, groups["actor"], train_set, val_set, tokenizer, tracking, total_steps).fit()


def _dataset(config: SFTConfig, tokenizer: Any, which: str) -> Any:
    from podium.utils.dataset import SFTDataset

    data = config.data
    return SFTDataset(
        getattr(data, which),
        tokenizer,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        truncation=data.truncation,
        key=f"data.{which}",
    )


if __name__ == "__main__":
    run_main(main)
