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
    from transformers import AutoModelForCausalLM

    from podium.models.hf import load_hf_config
    from podium.models.lora import check_lora
    from podium.protocol import ClassWithInitArgs
    from podium.trainer.chat import load_chat_tokenizer
    from podium.trainer.sft.objective import sft_objective
    from podium.trainer.sft.run import make_supervised_plan, run_supervised
    from podium.trainer.sft.trainer import SFTTrainer
    from podium.utils.dataset_chat import PackedDataset
    from podium.workers.actor import ActorWorker

    data, model = config.data, config.model
    hf_config = load_hf_config(model.path, "model.path", model.trust_remote_code)
    check_lora(hf_config, model, AutoModelForCausalLM, "model")
    tokenizer = load_chat_tokenizer(model.path, data, model.trust_remote_code, "model.path")

    train_set: Any = _dataset(config, tokenizer, "train_files")
    val_set = _dataset(config, tokenizer, "val_files") if data.val_files else None
    if data.packing:
        train_set = PackedDataset(train_set, tokenizer.pad_token_id, _width(config))
    plan = make_supervised_plan(config, len(train_set))
    actor = ClassWithInitArgs(
        ActorWorker,
        model,
        config,
        sft_objective,
        mini_batch_rows=plan.rows,
        micro_batch_rows=plan.micro,
        infer_rows=plan.micro,
        seed=config.trainer.seed,
        total_steps=plan.total_steps,
    )
    return run_supervised(config, plan, "actor", actor, SFTTrainer, train_set, val_set, tokenizer)


def _dataset(config: SFTConfig, tokenizer: Any, which: str) -> Any:
    from podium.trainer.chat import chat_options
    from podium.utils.dataset_chat import ChatDataset
    from podium.utils.dataset_sft import SFTDataset

    data = config.data
    common: dict[str, Any] = {
        "truncation": data.truncation,
        "chat": chat_options(data),
        "key": f"data.{which}",
    }
    files = getattr(data, which)
    if data.messages_key is not None:
        return ChatDataset(files, tokenizer, messages_key=data.messages_key, max_length=data.max_length, **common)
    return SFTDataset(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        **common,
    )


def _width(config: SFTConfig) -> int:
    data = config.data
    return data.max_length if data.messages_key is not None else data.max_prompt_length + data.max_response_length


if __name__ == "__main__":
    run_main(main)
