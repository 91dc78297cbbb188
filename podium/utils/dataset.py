"""Prompts for PPO and prompt-response pairs for SFT: from files to batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podium.utils.data_files import RowReader
from podium.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATIONS = ("error", "left", "right", "middle")
# Columns of the batch that a data file's column of the same name would overwrite.
_RESERVED = ("prompts", "prompt_mask", "responses", "response_mask", "input_ids", "attention_mask", "position_ids")
_TOKENIZE_ROWS = 4096


@dataclass(frozen=True)
class DataReport:
    """What became of a data set's rows."""

    kept: int
    """Rows in the data set."""
    dropped: int
    """Rows left out because their prompt was longer than the limit."""
    truncated: int
    """Rows kept with some tokens cut off."""

    def __str__(self) -> str:
        return f"{self.kept} rows kept, {self.dropped} overlong dropped, {self.truncated} truncated"


def truncate_ids(ids: Sequence[int], limit: int, how: str) -> list[int]:
    """At most `limit` of `ids`, cut on the ``left``, on the ``right`` or in the ``middle``."""
    assert how in TRUNCATIONS[1:] and limit > 0, (how, limit)
    if len(ids) <= limit:
        return list(ids)
    if how == "left":
        return list(ids[-limit:])
    head = limit if how == "right" else (limit + 1) // 2
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]


def _check_truncation(truncation: str) -> None:
    if truncation not in TRUNCATIONS:
        raise UserError(f"data.truncation={truncation}: expected one of {', '.join(TRUNCATIONS)}")


class _PromptRenderer:
    """Prompts to token ids: a string as it stands, a chat list through the tokenizer's template."""

    def __init__(self, rows: RowReader, tokenizer: "PreTrainedTokenizerBase", prompt_key: str, kwargs: Any):
        self._rows, self._tokenizer, self._key, self._kwargs = rows, tokenizer, prompt_key, dict(kwargs or {})

    def __call__(self) -> Iterator[list[int]]:
        """Token ids of every row's prompt, in order."""
        pending: list[tuple[int, str, bool]] = []
        for row, prompt in enumerate(self._rows.column(self._key)):
            pending.append((row, *self._text(row, prompt)))
            if len(pending) == _TOKENIZE_ROWS:
                yield from self._tokenize(pending)
                pending = []
        yield from self._tokenize(pending)

    def _text(self, row: int, prompt: Any) -> tuple[str, bool]:
        """The prompt's text, and whether the tokenizer's special tokens are still to be added."""
        if isinstance(prompt, str):
            return prompt, True
        if _is_chat(prompt):
            return self._chat(row, prompt), False
        kind = "null" if prompt is None else type(prompt).__name__
        raise UserError(
            f"{self._rows.where(row)}: column '{self._key}' is {kind}; expected a string or a non-empty list of "
            "messages {role, content}"
        )

    def _chat(self, row: int, messages: list[dict[str, Any]]) -> str:
        if not self._tokenizer.chat_template:
            raise UserError(
                f"{self._rows.where(row)}: column '{self._key}' is a chat, but the tokenizer has no chat template; "
                "use string prompts, or a model with a template"
            )
        # Parquet gives every message every field that any message has; a template must not see the empty ones.
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self._kwargs
                )
            )
        except Exception as error:  # a template raises what it likes
            reason = " ".join(str(error).split())
            raise UserError(f"{self._rows.where(row)}: the chat template refuses the prompt ({reason})") from error

    def _tokenize(self, pending: list[tuple[int, str, bool]]) -> Iterator[list[int]]:
        encoded: dict[int, list[int]] = {}
        for special in (True, False):
            chosen = [(row, text) for row, text, add in pending if add is special]
            if chosen:
                ids = self._tokenizer([text for _, text in chosen], add_special_tokens=special).input_ids
                encoded.update(zip((row for row, _ in chosen), ids, strict=True))
        for row, text, special in pending:
            ids = encoded[row]
            # Some tokenizers close every text with the end of the sequence; a prompt is to be continued.
            if special and ids and ids[-1] == self._tokenizer.eos_token_id and not text.endswith(self._eos):
                ids = ids[:-1]
            if not ids:
                raise UserError(f"{self._rows.where(row)}: column '{self._key}' has no tokens; give it some text")
            yield ids

    @property
    def _eos(self) -> str:
        return str(self._tokenizer.eos_token)


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and m.get("role") is not None and m.get("content") is not None for m in prompt)
    )


class PromptDataset:
    """Prompts with what their scoring needs, from files in verl's columns.

    Columns: `prompt_key` (a string, tokenized as it stands, or a chat list of ``{role, content}``, through the
    tokenizer's template with a generation prompt), ``data_source``, ``reward_model`` (``{style, ground_truth}``),
    ``extra_info``; any other is carried along. All prompts are tokenized here, so that bad rows are told before
    anything starts; `report` counts what was kept, dropped and truncated.

    ``dataset[i]`` is a dict: ``prompt_ids`` (list of ints, 1 to `max_prompt_length`), ``raw_prompt`` (as in the file),
    ``index`` (row number over all files, dropped rows counted), ``data_source`` ("unknown" when absent),
    ``reward_model`` and ``extra_info`` ({} when absent), and the other columns.

    Raises:
        UserError: missing file or column, no rows left, a prompt that is null, empty or of another type, a chat without
            a template, or, with ``truncation="error"``, a prompt over the limit: always with file and row.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int,
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        key: str = "data.train_files",
    ):
        _check_truncation(truncation)
        self._rows = RowReader(files, key=key)
        self._rows.require(prompt_key, "data.prompt_key")
        self._prompt_key = prompt_key
        taken = [name for name in self._rows.columns if name in _RESERVED and name != prompt_key]
        if taken:
            raise UserError(f"{key}: column '{taken[0]}' has the name of a batch column; rename it in the file")
        render = _PromptRenderer(self._rows, tokenizer, prompt_key, apply_chat_template_kwargs)
        self._ids, self._index, dropped, truncated = [], [], 0, 0  # type: list[np.ndarray], list[int], int, int
        for row, ids in enumerate(render()):
            if len(ids) > max_prompt_length:
                if filter_overlong_prompts:
                    dropped += 1
                    continue
                if truncation == "error":
                    raise UserError(
                        f"{self._rows.where(row)}: the prompt has {len(ids)} tokens, data.max_prompt_length is "
                        f"{max_prompt_length}; raise it, or set data.truncation or data.filter_overlong_prompts"
                    )
                ids = truncate_ids(ids, max_prompt_length, truncation)
                truncated += 1
            self._ids.append(np.asarray(ids, dtype=np.int32))
            self._index.append(row)
        if not self._ids:
            raise UserError(
                f"{key}={', '.join(self._rows.files)}: all {dropped} prompts are longer than "
                f"data.max_prompt_length={max_prompt_length}"
            )
        self.report = DataReport(kept=len(self._ids), dropped=dropped, truncated=truncated)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self._index[item]
        row = self._rows[index]
        raw_prompt = row.pop(self._prompt_key)
        return {
            **row,
            "data_source": row.get("data_source") or "unknown",
            "reward_model": row.get("reward_model") or {},
            "extra_info": row.get("extra_info") or {},
            "raw_prompt": raw_prompt,
            "index": index,
            "prompt_ids": self._ids[item].tolist(),
        }


def collate_prompts(
    rows: Sequence[Mapping[str, Any]], pad_token_id: int, max_prompt_length: int
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Rows of a `PromptDataset` as one batch of B.

    Returns:
        Tensors ``prompts`` (B, `max_prompt_length`), int64, left-padded, and ``prompt_mask`` (same shape, bool); and
        object arrays (B,) of every column, ``prompt_ids`` among them.
    """
    prompts, mask = _pad([row["prompt_ids"] for row in rows], pad_token_id, max_prompt_length, left=True)
    objects = {name: _object_array([row[name] for row in rows]) for name in rows[0]}
    return {"prompts": prompts, "prompt_mask": mask}, objects


class SFTDataset:
    """Prompts and the responses to learn, tokenized one after the other; the response ends with end-of-sequence.

    The prompt is handled as in `PromptDataset`, the response is a string. Both limits are in tokens, that of the
    response includes end-of-sequence; `truncation` applies to each part by itself (a response cut on the right loses
    its end-of-sequence: it does not teach to stop there).

    ``dataset[i]`` is a dict: ``input_ids`` (prompt then response, list of ints), ``prompt_length`` (the loss is on what
    follows), ``index``.

    Raises:
        UserError: as `PromptDataset`, and for the response column too.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        prompt_key: str = "prompt",
        response_key: str = "response",
        max_prompt_length: int,
        max_response_length: int,
        truncation: str = "error",
        key: str = "data.train_files",
    ):
        _check_truncation(truncation)
        rows = RowReader(files, key=key)
        rows.require(prompt_key, "data.prompt_key")
        rows.require(response_key, "data.response_key")
        limits = {"prompt": max_prompt_length, "response": max_response_length}
        prompts = _PromptRenderer(rows, tokenizer, prompt_key, None)()
        responses = _response_ids(rows, tokenizer, response_key)
        self._rows: list[tuple[np.ndarray, int]] = []
        truncated = 0
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            parts = {"prompt": prompt, "response": response}
            for part, ids in parts.items():
                if len(ids) > limits[part] and truncation == "error":
                    raise UserError(
                        f"{rows.where(row)}: the {part} has {len(ids)} tokens, data.max_{part}_length is "
                        f"{limits[part]}; raise it, or set data.truncation"
                    )
            truncated += any(len(ids) > limits[part] for part, ids in parts.items())
            if truncation != "error":
                prompt, response = (truncate_ids(ids, limits[part], truncation) for part, ids in parts.items())
            self._rows.append((np.asarray(prompt + response, dtype=np.int32), len(prompt)))
        self.report = DataReport(kept=len(self._rows), dropped=0, truncated=truncated)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        ids, prompt_length = self._rows[item]
        return {"input_ids": ids.tolist(), "prompt_length": prompt_length, "index": item}


def _response_ids(rows: RowReader, tokenizer: "PreTrainedTokenizerBase", key: str) -> Iterator[list[int]]:
    eos = tokenizer.eos_token_id
    for row, text in enumerate(rows.column(key)):
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise UserError(f"{rows.where(row)}: column '{key}' is {kind}; expected a string")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        yield ids if ids and ids[-1] == eos else [*ids, eos]


def collate_sft(
    rows: Sequence[Mapping[str, Any]], pad_token_id: int, max_prompt_length: int, max_response_length: int
) -> dict[str, torch.Tensor]:
    """Rows of an `SFTDataset` as one batch in the layout of PPO batches, P and R being the two limits.

    Returns:
        int64 ``prompts`` (B, P) left-padded, ``responses`` (B, R) right-padded, ``input_ids`` (B, P+R) and
        ``position_ids`` (B, P+R) counting from 0 at the first real token; bool ``attention_mask`` (B, P+R) and
        ``response_mask`` (B, R).
    """
    split = [(row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :]) for row in rows]
    prompts, prompt_mask = _pad([prompt for prompt, _ in split], pad_token_id, max_prompt_length, left=True)
    responses, response_mask = _pad([response for _, response in split], pad_token_id, max_response_length, left=False)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0),
    }


def _pad(sequences: list[list[int]], pad: int, width: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((len(sequences), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        assert len(sequence) <= width, f"row {row} has {len(sequence)} tokens, the batch is {width} wide"
        span = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, span] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, span] = True
    return ids, mask


def _object_array(values: list[Any]) -> np.ndarray:
    # np.array(values, dtype=object) would make a matrix of lists of equal length.
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


class EpochLoader:
    """Which rows come next, for ever: an iterator of ``(epoch, row indices)``, epoch counting from 0.

    The order of epoch e depends on (`seed`, e) alone, so a position is two numbers and resuming needs no replay.
    ``len(loader)`` is the number of batches in one epoch.

    Raises:
        UserError: a batch larger than the data set, when incomplete batches are dropped.
    """

    def __init__(self, dataset_len: int, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = True):
        if batch_size < 1 or (drop_last and batch_size > dataset_len):
            raise UserError(f"a batch of {batch_size} cannot be drawn from {dataset_len} rows; batch size 1 to that")
        self._len, self._batch, self._seed, self._shuffle = dataset_len, batch_size, seed, shuffle
        self._drop_last = drop_last
        self._epoch, self._position = 0, 0

    def __len__(self) -> int:
        return self._len // self._batch if self._drop_last else -(-self._len // self._batch)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        return self

    def __next__(self) -> tuple[int, np.ndarray]:
        if self._position >= len(self):
            self._epoch, self._position = self._epoch + 1, 0
        start = self._position * self._batch
        self._position += 1
        return self._epoch, self.order(self._epoch)[start : start + self._batch]

    def order(self, epoch: int) -> np.ndarray:
        """All row indices in the order of `epoch`."""
        if not self._shuffle:
            return np.arange(self._len)
        return np.random.default_rng([self._seed, epoch]).permutation(self._len)

    def state_dict(self) -> dict[str, int]:
        """The position (after the last batch handed out), and what it is a position in."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "dataset_len": self._len,
            "batch_size": self._batch,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where `state` was taken.

        Raises:
            UserError: another data set length, batch size or seed: the position would mean other rows.
        """
        mine = self.state_dict()
        for name in ("dataset_len", "batch_size", "seed"):
            if state[name] != mine[name]:
                raise UserError(f"cannot resume the data order: {name} was {state[name]} and is now {mine[name]}")
        self._epoch, self._position = state["epoch"], state["position"]
