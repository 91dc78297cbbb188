"""Which tokens of a conversation the assistant wrote, by the chat template's own spans."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podium.utils.dataset_text import ChatOptions, RowError, chat_messages, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class AssistantMasks:
    """Token ids of conversations, and which of them an assistant would have to generate.

    A template with generation marks says so itself. Otherwise each assistant turn is what the template adds to the
    conversation before it, generation prompt included; the additions must be the very text of the whole conversation.
    A turn ends with the special token that closes it: white space behind that is the template's.

    Raises:
        RowError: when called; the template has no marks and renders a turn differently once another follows, or a token
            is partly the template's and partly the assistant's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", column: str, chat: ChatOptions | None = None):
        self._tokenizer, self._column, self._chat = tokenizer, column, chat or ChatOptions()
        self._marked = bool(_GENERATION.search(str(tokenizer.chat_template or "")))
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._closing = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)

    def __call__(self, row: int, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation, and for each whether the assistant wrote it."""
        ids, mask = self._by_marks(row, messages) if self._marked else self._by_difference(row, messages)
        if not any(mask):
            raise RowError(row, f"column '{self._column}' has no assistant turn to learn")
        return ids, mask

    def _by_marks(self, row: int, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        try:
            encoded: Any = self._tokenizer.apply_chat_template(
                chat_messages(messages, self._chat),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **dict(self._chat.template_kwargs),
            )
        except Exception as error:  # a template raises what it likes
            reason = " ".join(str(error).split())
            raise RowError(row, f"the chat template refuses column '{self._column}' ({reason})") from error
        return list(encoded["input_ids"]), [bool(value) for value in encoded["assistant_masks"]]

    def _by_difference(self, row: int, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        text = self._render(row, messages)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [False] * len(encoded.input_ids)
        for begin, end in self._spans(row, messages, text):
            for position, (start, stop) in enumerate(encoded.offset_mapping):
                if stop <= begin or start >= end or start == stop:
                    continue
                if start >= begin:
                    mask[position] = True
                elif text[begin:stop].strip():
                    raise RowError(
                        row,
                        f"column '{self._column}': the token {text[start:stop]!r} is partly the template's and partly "
                        "the assistant's; give a chat template with generation marks (data.chat_template)",
                    )
        return list(encoded.input_ids), mask

    def _spans(self, row: int, messages: Sequence[Mapping[str, Any]], text: str) -> list[tuple[int, int]]:
        """Where the assistant's turns lie in the text of the whole conversation, as ``(begin, end)``."""
        spans = []
        for turn, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            if turn == 0 and self._chat.system_prompt is None:
                raise RowError(row, f"column '{self._column}' begins with the assistant, who has nothing to answer yet")
            before = self._render(row, messages[:turn], add_generation_prompt=True)
            until = self._render(row, messages[: turn + 1])
            if not (until.startswith(before) and text.startswith(until)):
                raise RowError(
                    row,
                    f"column '{self._column}': the chat template renders the assistant's message {turn} differently "
                    "when it stands last, so its tokens cannot be told by comparison; give a template with generation "
                    "marks (data.chat_template), or conversations that end with their only assistant message",
                )
            spans.append((len(before), self._end_of_turn(until, len(before))))
        return spans

    def _render(self, row: int, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        return render_chat(
            self._tokenizer, messages, self._chat, row, self._column, add_generation_prompt=add_generation_prompt
        )

    def _end_of_turn(self, text: str, begin: int) -> int:
        stripped = text.rstrip()
        closed = any(stripped.endswith(token) for token in self._closing) and len(stripped) > begin
        return len(stripped) if closed else len(text)
