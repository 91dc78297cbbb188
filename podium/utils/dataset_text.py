"""Prompts to token ids: a string as it stands, a chat list through the tokenizer's template."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podium.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATIONS = ("error", "left", "right", "middle")
ROWS_AT_ONCE = 4096
"""Rows tokenized in one call: the tokenizer's own threads need many texts."""


class RowError(Exception):
    """What is wrong with a row; who knows the file turns it into a `UserError` that names both."""

    def __init__(self, row: int, reason: str):
        super().__init__(row, reason)
        self.row, self.reason = row, reason


@dataclass(frozen=True)
class ChatOptions:
    """How chat lists become text."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as ``enable_thinking``."""
    system_prompt: str | None = None
    """First message of every chat that has no system message of its own."""


def use_chat_template(tokenizer: "PreTrainedTokenizerBase", path: str | None, key: str) -> None:
    """Gives the tokenizer the Jinja template in the file at `path`; None leaves its own.

    Raises:
        UserError: there is no such file.
    """
    if path is None:
        return
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{key}={path}: there is no such file; give a Jinja chat template")
    tokenizer.chat_template = file.read_text(encoding="utf-8")


class PromptEncoder:
    """Prompts to token ids.

    Args:
        column: name of the column, for errors.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", column: str, chat: ChatOptions | None = None):
        self._tokenizer, self._column, self._chat = tokenizer, column, chat or ChatOptions()

    def __call__(self, prompts: Iterable[Any], first_row: int = 0) -> Iterator[list[int]]:
        """Token ids of each prompt, in order.

        Raises:
            RowError: a prompt that is null, empty or of another type, or that the template refuses.
        """
        numbered = enumerate(prompts, first_row)
        while block := list(islice(numbered, ROWS_AT_ONCE)):
            yield from self._tokenize([(row, *self.text(row, prompt)) for row, prompt in block])

    def text(self, row: int, prompt: Any) -> tuple[str, bool]:
        """The prompt's text, and whether the tokenizer's special tokens are still to be added."""
        if isinstance(prompt, str):
            if self._chat.system_prompt is not None:
                raise RowError(
                    row, f"column '{self._column}' is a string, and data.system_prompt can only go before a chat"
                )
            return prompt, True
        if is_chat(prompt):
            return render_chat(
                self._tokenizer, prompt, self._chat, row, self._column, add_generation_prompt=True
            ), False
        raise RowError(
            row,
            f"column '{self._column}' is {kind_of(prompt)}; expected a string or a non-empty list of messages "
            "{role, content}",
        )

    def _tokenize(self, block: list[tuple[int, str, bool]]) -> Iterator[list[int]]:
        encoded: dict[int, list[int]] = {}
        for special in (True, False):
            chosen = [(row, text) for row, text, add in block if add is special]
            if chosen:
                ids = self._tokenizer([text for _, text in chosen], add_special_tokens=special).input_ids
                encoded.update(zip((row for row, _ in chosen), ids, strict=True))
        eos = str(self._tokenizer.eos_token)
        for row, text, special in block:
            ids = encoded[row]
            # Some tokenizers close every text with the end of the sequence; a prompt is to be continued.
            if special and ids and ids[-1] == self._tokenizer.eos_token_id and not text.endswith(eos):
                ids = ids[:-1]
            if not ids:
                raise RowError(row, f"column '{self._column}' has no tokens; give it some text")
            yield ids


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    chat: ChatOptions,
    row: int,
    column: str,
    **options: Any,
) -> str:
    """The template's text for some messages.

    Raises:
        RowError: no template, or one that refuses the messages.
    """
    if not tokenizer.chat_template:
        raise RowError(
            row,
            f"column '{column}' is a chat, but the tokenizer has no chat template; use string prompts, a model with a "
            "template, or data.chat_template",
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                chat_messages(messages, chat), tokenize=False, **options, **dict(chat.template_kwargs)
            )
        )
    except Exception as error:  # a template raises what it likes
        reason = " ".join(str(error).split())
        raise RowError(row, f"the chat template refuses column '{column}' ({reason})") from error


def chat_messages(messages: Sequence[Mapping[str, Any]], chat: ChatOptions) -> list[dict[str, Any]]:
    """The messages as a template should see them, the system prompt first where it is missing."""
    # Parquet gives every message every field that any message has; a template must not see the empty ones.
    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    if chat.system_prompt is not None and not (plain and plain[0].get("role") == "system"):
        plain.insert(0, {"role": "system", "content": chat.system_prompt})
    return plain


def is_chat(prompt: Any) -> bool:
    """Whether this is a non-empty list of ``{role, content}``."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and m.get("role") is not None and m.get("content") is not None for m in prompt)
    )


def chat_as_text(prompt: Any) -> str:
    """A prompt for people to read, and for judges: a chat one line ``role: content`` a message."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def kind_of(value: Any) -> str:
    """What errors call a value of the wrong type."""
    return "null" if value is None else type(value).__name__


def response_ids(tokenizer: "PreTrainedTokenizerBase", text: Any, row: int, column: str) -> list[int]:
    """A response's token ids, closed by end-of-sequence.

    Raises:
        RowError: it is no string.
    """
    if not isinstance(text, str):
        raise RowError(row, f"column '{column}' is {kind_of(text)}; expected a string")
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    eos = tokenizer.eos_token_id
    return ids if ids and ids[-1] == eos else [*ids, eos]


def check_truncation(truncation: str) -> None:
    """Raises a `UserError` unless it is one of `TRUNCATIONS`."""
    if truncation not in TRUNCATIONS:
        raise UserError(f"data.truncation={truncation}: expected one of {', '.join(TRUNCATIONS)}")


def truncate_ids(ids: Sequence[int], limit: int, how: str) -> list[int]:
    """At most `limit` of `ids`, cut on the ``left``, on the ``right`` or in the ``middle``."""
    assert how in TRUNCATIONS[1:] and limit > 0, (how, limit)
    if len(ids) <= limit:
        return list(ids)
    if how == "left":
        return list(ids[-limit:])
    head = limit if how == "right" else (limit + 1) // 2
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]


def pad_rows(sequences: list[list[int]], pad: int, width: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, `width`) int64 and their mask (B, `width`) bool."""
    ids = torch.full((len(sequences), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        assert len(sequence) <= width, f"row {row} has {len(sequence)} tokens, the batch is {width} wide"
        span = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, span] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, span] = True
    return ids, mask


def digest_rows(rows: Iterable[np.ndarray]) -> str:
    """A digest of rows of numbers, in their order."""
    digest = hashlib.sha256()
    for ids in rows:
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()


def object_array(values: Sequence[Any]) -> np.ndarray:
    """(B,) objects; ``np.array(values, dtype=object)`` would make a matrix of lists of equal length."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
