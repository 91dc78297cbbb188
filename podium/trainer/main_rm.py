"""Reward-model training: ``python3 -m podium.trainer.main_rm key=value ...`` (``--help`` lists the keys)."""

from typing import Any

from podium.trainer.cli import run_main
from podium.trainer.config import RMConfig, check_rm_config, parse_command_line
from podium.utils.errors import UserError


def main() -> None:
    """Reads the command line and trains."""
    config, explicit = parse_command_line(RMConfig, "python3 -m podium.trainer.main_rm")
    check_rm_config(config, explicit)
    train(config)


def train(config: RMConfig) -> dict[str, float]:
    """Trains as configured. Returns the last validation's metrics.

    Raises:
        UserError: bad input.
    """
    from transformers import AutoModel

    from podium.models.hf import load_hf_config
    from podium.models.lora import check_lora
    from podium.protocol import ClassWithInitArgs
    from podium.trainer.chat import chat_options, load_chat_tokenizer
    from podium.trainer.rm.objective import preference_objective
    from podium.trainer.rm.trainer import RMTrainer
    from podium.trainer.sft.run import make_supervised_plan, run_supervised
    from podium.utils.dataset_pairs import PreferenceDataset
    from podium.workers.reward_model import RewardModelTrainer

    data, model = config.data, config.model
    hf_config = load_hf_config(model.path, "model.path", model.trust_remote_code)
    check_lora(hf_config, model, AutoModel, "model")
    tokenizer = load_chat_tokenizer(model.path, data, model.trust_remote_code, "model.path")
    _own_pad_token(tokenizer, model.path)

    def dataset(which: str) -> Any:
        return PreferenceDataset(
            getattr(data, which),
            tokenizer,
            prompt_key=data.prompt_key,
            chosen_key=data.chosen_key,
            rejected_key=data.rejected_key,
            margin_key=data.margin_key,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            truncation=data.truncation,
            chat=chat_options(data),
            key=f"data.{which}",
        )

    train_set, val_set = dataset("train_files"), dataset("val_files") if data.val_files else None
    plan = make_supervised_plan(config, len(train_set))
    role = ClassWithInitArgs(
        RewardModelTrainer,
        config,
        preference_objective,
        pad_token_id=tokenizer.pad_token_id,
        seed=config.trainer.seed,
        mini_batch_rows=2 * plan.rows,
        micro_batch_rows=2 * plan.micro,
        total_steps=plan.total_steps,
    )
    return run_supervised(config, plan, "reward_model", role, RMTrainer, train_set, val_set, tokenizer)


def _own_pad_token(tokenizer: Any, path: str) -> None:
    """Takes a padding token that ends no text.

    transformers reads the score at the last token that is not padding. If that were end-of-sequence, it would read one
    token before the one that the score was trained on.

    Raises:
        UserError: there is none.
    """
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    for token in (tokenizer.unk_token, tokenizer.bos_token):
        if token is not None and token != tokenizer.eos_token:
            tokenizer.pad_token = token
            return
    raise UserError(
        f"model.path={path}: the tokenizer pads with its end-of-sequence token, and has no unknown or "
        "beginning-of-sequence token to take instead; set pad_token in its files to a token that ends no text"
    )


if __name__ == "__main__":
    run_main(main)
