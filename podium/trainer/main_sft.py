"""Supervised fine-tuning: ``python3 -m podium.trainer.main_sft key=value ...`` (``--help`` lists the keys)."""

from typing import Any

from podium.trainer.cli import run_main
from podium.trainer.config import SFTConfig, check_sft_config, parse_command_line


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
    from podium.trainer.chat import chat_options, load_chat_tokenizer
    from podium.trainer.sft.objective import sft_objective
    from podium.trainer.sft.run import make_supervised_plan, run_supervised
    from podium.trainer.sft.trainer import SFTTrainer
    from podium.utils.dataset_sft import SFTDataset
    from podium.workers.actor import ActorWorker

    data, model = config.data, config.model
    load_hf_config(model.path, "model.path", model.trust_remote_code)
    tokenizer = load_chat_tokenizer(model.path, data, model.trust_remote_code, "model.path")

    def dataset(which: str) -> Any:
        return SFTDataset(
            getattr(data, which),
            tokenizer,
            prompt_key=data.prompt_key,
            response_key=data.response_key,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            truncation=data.truncation,
            chat=chat_options(data),
            key=f"data.{which}",
        )

    train_set, val_set = dataset("train_files"), dataset("val_files") if data.val_files else None
    plan = make_supervised_plan(config, len(train_set))
    actor = ClassWithInitArgs(
        ActorWorker,
        model,
        config,
        sft_objective,
        mini_batch_rows=plan.rows,
        micro_batch_rows=plan.micro,
        infer_rows=plan.micro,
        total_steps=plan.total_steps,
    )
    return run_supervised(config, plan, "actor", actor, SFTTrainer, train_set, val_set, tokenizer)


if __name__ == "__main__":
    run_main(main)
