"""A response in the words of a model that scores: token ids of its own tokenizer."""

from typing import TYPE_CHECKING, Any

from podium.utils.dataset_text import ChatOptions, PromptEncoder, RowError, render_chat, response_ids
from podium.utils.errors import UserError
from podium.workers.reward.judge import JudgeTemplate
from podium.workers.reward.outcome import ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation:
    """The prompt with its response, as a reward model reads it that has another tokenizer than the policy.

    A chat goes through the model's own chat template with the response as the assistant's turn. A string goes on with
    the response and end-of-sequence, as `main_rm` trains on it.

    Args:
        limit: most tokens that the model takes; None is no limit.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", limit: int | None):
        self._tokenizer, self._limit = tokenizer, limit
        self._encoder = PromptEncoder(tokenizer, "prompt")

    def __call__(self, request: ScoreRequest) -> list[int]:
        """Its token ids; the score belongs to the last.

        Raises:
            UserError: the chat template refuses it, or it is too long.
        """
        try:
            ids = self._encode(request.prompt, request.solution_str)
        except RowError as error:
            raise UserError(f"the reward model cannot read it: {error.reason}") from error
        if self._limit is not None and len(ids) > self._limit:
            raise UserError(f"it has {len(ids)} tokens of the reward model, which takes {self._limit}")
        return ids

    def _encode(self, prompt: Any, response: str) -> list[int]:
        if isinstance(prompt, str):
            [ids] = self._encoder([prompt])
            return [*ids, *response_ids(self._tokenizer, response, 0, "response")]
        turns = [*prompt, {"role": "assistant", "content": response}]
        text = render_chat(self._tokenizer, turns, ChatOptions(), 0, "prompt")
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


class JudgePrompt:
    """What a judge is asked about a response: one message from the user, or plain text for a model without a template.

    Args:
        limit: most tokens.
    """

    def __init__(self, template: JudgeTemplate, tokenizer: "PreTrainedTokenizerBase", limit: int):
        self._template, self._limit = template, limit
        self._chats = bool(tokenizer.chat_template)
        self._encoder = PromptEncoder(tokenizer, "prompt")

    def __call__(self, request: ScoreRequest) -> list[int]:
        """Its token ids.

        Raises:
            UserError: a template refuses it, or it is too long.
        """
        text = self._template(request)
        try:
            [ids] = self._encoder([[{"role": "user", "content": text}] if self._chats else text])
        except RowError as error:
            raise UserError(f"the judge cannot read it: {error.reason}") from error
        if len(ids) > self._limit:
            raise UserError(
                f"the judge is asked in {len(ids)} tokens, reward_model.judge.max_prompt_length is {self._limit}"
            )
        return ids
