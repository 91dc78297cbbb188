"""Prompts for PPO: from files to batches, and the order in which they come."""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podium.utils.data_files import RowReader
from podium.utils.dataset_order import Sampler
from podium.utils.dataset_parallel import encode_prompts
from podium.utils.dataset_text import (
    ChatOptions,
    PromptEncoder,
    RowError,
    check_truncation,
    digest_rows,
    object_array,
    pad_rows,
    truncate_ids,
)
from podium.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a file may call otherwise.
_COLUMNS = ("data_source", "reward_model", "extra_info", "ground_truth")
# Columns of the batch that a data file's column of the same name would overwrite.
_RESERVED = ("prompts", "prompt_mask", "responses", "response_mask", "input_ids", "attention_mask", "position_ids")


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


class PromptDataset:
    """Prompts with what their scoring needs, from files in verl's columns.

    Columns: `prompt_key` (a string, tokenized as it stands, or a chat list of ``{role, content}``, through the
    tokenizer's template with a generation prompt), ``data_source``, ``reward_model`` (``{style, ground_truth}``),
    ``extra_info``; any other is carried along. `column_names` says what a file calls one of these three, or
    ``ground_truth``, where it has that in a column of its own. All prompts are tokenized here, so that bad rows are
    told before anything starts; `report` counts what was kept, dropped and truncated.

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
        workers: int = 1,
        chat: ChatOptions | None = None,
        column_names: Mapping[str, str] | None = None,
        key: str = "data.train_files",
    ):
        check_truncation(truncation)
        self._rows = RowReader(files, key=key)
        self._rows.require(prompt_key, "data.prompt_key")
        self._prompt_key = prompt_key
        self._names = self._checked_names(column_names or {})
        taken = [name for name in self._rows.columns if name in _RESERVED and name != prompt_key]
        if taken:
            raise UserError(f"{key}: column '{taken[0]}' has the name of a batch column; rename it in the file")
        self._ids: list[np.ndarray] = []
        self._index: list[int] = []
        dropped = truncated = 0
        try:
            encoder = PromptEncoder(tokenizer, prompt_key, chat)
            for row, ids in enumerate(encode_prompts(encoder, self._rows.column(prompt_key), workers)):
                if len(ids) > max_prompt_length:
                    if filter_overlong_prompts:
                        dropped += 1
                        continue
                    if truncation == "error":
                        raise RowError(
                            row,
                            f"the prompt has {len(ids)} tokens, data.max_prompt_length is {max_prompt_length}; raise "
                            "it, or set data.truncation or data.filter_overlong_prompts",
                        )
                    ids = np.asarray(truncate_ids(ids.tolist(), max_prompt_length, truncation), dtype=np.int32)
                    truncated += 1
                self._ids.append(ids)
                self._index.append(row)
        except RowError as error:
            raise UserError(f"{self._rows.where(error.row)}: {error.reason}") from error
        if not self._ids:
            raise UserError(
                f"{key}={', '.join(self._rows.files)}: all {dropped} prompts are longer than "
                f"data.max_prompt_length={max_prompt_length}"
            )
        self.report = DataReport(kept=len(self._ids), dropped=dropped, truncated=truncated)

    def _checked_names(self, names: Mapping[str, str]) -> dict[str, str]:
        for name, column in names.items():
            if name not in _COLUMNS:
                raise UserError(f"data.column_names has '{name}'; expected one of {', '.join(_COLUMNS)}")
            self._rows.require(column, f"data.column_names.{name}")
        return dict(names)

    def __len__(self) -> int:
        return len(self._ids)

    def by_entry(self) -> list[np.ndarray]:
        """Items that come from each of the `files` given, a pattern or a folder being one."""
        entries = np.array([self._rows.entry(row) for row in self._index])
        return [np.flatnonzero(entries == entry) for entry in range(max(self._rows.entries) + 1)]

    @property
    def files(self) -> list[str]:
        """Where the rows come from."""
        return self._rows.files

    def file_row(self, item: int) -> dict[str, Any]:
        """The row as it is in the file."""
        return self._rows[self._index[item]]

    @property
    def columns(self) -> list[str]:
        """Of the files."""
        return self._rows.columns

    def where(self, item: int) -> str:
        """What errors call ``dataset[item]``: file and row."""
        return self._rows.where(self._index[item])

    def first_of_each_source(self) -> dict[str, int]:
        """The first item of each ``data_source``."""
        sources = list(self._rows.column(self._names.get("data_source", "data_source")))
        first: dict[str, int] = {}
        for item, row in enumerate(self._index):
            first.setdefault(sources[row] or "unknown", item)
        return first

    def fingerprint(self) -> str:
        """A digest of all rows in their order, of each its prompt and what it is scored by.

        Equal for the same rows, whatever their files are called.
        """
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        kept = set(self._index)
        scored_by = (
            np.frombuffer(json.dumps(value, sort_keys=True, default=repr).encode(), dtype=np.uint8)
            for name in _COLUMNS
            for row, value in enumerate(self._rows.column(self._names.get(name, name)))
            if row in kept
        )
        return digest_rows(itertools.chain(self._ids, scored_by))

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self._index[item]
        row = self._rows[index]
        raw_prompt = row.pop(self._prompt_key)
        for name, column in self._names.items():
            if name == "ground_truth":
                row["reward_model"] = {**(row.get("reward_model") or {}), "ground_truth": row[column]}
            else:
                row[name] = row[column]
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
    prompts, mask = pad_rows([row["prompt_ids"] for row in rows], pad_token_id, max_prompt_length, left=True)
    objects = {name: object_array([row[name] for row in rows]) for name in rows[0]}
    return {"prompts": prompts, "prompt_mask": mask}, objects


class EpochLoader(Sampler):
    """Every row once an epoch.

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
