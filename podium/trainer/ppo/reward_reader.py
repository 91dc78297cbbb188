"""How a model that scores reads responses, found out and tried before any worker starts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from podium.models.hf import load_hf_config
from podium.trainer.config.reward import JudgeConfig, RewardModelConfig
from podium.utils.dataset import PromptDataset
from podium.utils.errors import UserError
from podium.utils.tokenizer import load_tokenizer
from podium.workers.reward.judge import JudgeTemplate, Verdict
from podium.workers.reward.manager import trial_request
from podium.workers.reward.model_text import Conversation, JudgePrompt
from podium.workers.reward.outcome import ScoreRequest

Encode = Callable[[ScoreRequest], list[int]]
"""A response in the model's own tokens; a `UserError` says why it has none."""


@dataclass(frozen=True)
class Reader:
    """A model that reads text, in tokens of its own."""

    encode: Encode
    tokenizer: Any


def reward_reader(config: RewardModelConfig, tokenizer: Any) -> Reader | None:
    """How the reward model reads; None where it takes the policy's tokens as they are.

    Args:
        tokenizer: the policy's.

    Raises:
        UserError: no tokenizer there, or a judge's template or verdict that is none.
    """
    model, key = config.model, "reward_model.model.path"
    assert model.path is not None, "check_models comes first"
    own = load_tokenizer(model.path, model.trust_remote_code, key=key)
    if config.style == "generative":
        read_verdict(config.judge)
        template = JudgeTemplate(config.judge.template, "reward_model.judge.template")
        return Reader(JudgePrompt(template, own, config.judge.max_prompt_length), own)
    if own.get_vocab() == tokenizer.get_vocab() and own.eos_token_id == tokenizer.eos_token_id:
        return None
    print(f"reward model  {model.path} has a tokenizer of its own: it reads the text of prompts and responses")
    positions = getattr(load_hf_config(model.path, key, model.trust_remote_code), "max_position_embeddings", None)
    return Reader(Conversation(own, positions), own)


def read_verdict(judge: JudgeConfig) -> Verdict:
    """What finds the score in a judge's answer.

    Raises:
        UserError: its settings find none.
    """
    return Verdict(judge.verdict, judge.score_range, "reward_model.judge")


def check_reader(reader: Reader, datasets: Iterable[PromptDataset]) -> None:
    """Puts one row of each data source into the model's words, with the ground truth as the response.

    Raises:
        UserError: it cannot be; names the row.
    """
    for dataset in datasets:
        for item in dataset.first_of_each_source().values():
            try:
                reader.encode(trial_request(dataset[item]))
            except UserError as error:
                raise UserError(f"{dataset.where(item)}: {error}") from error
