"""Preference pairs: a prompt with a chosen and a rejected response."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podium.utils.data_files import RowReader
from podium.utils.dataset import DataReport
from podium.utils.dataset_sft import PartLimits, collate_sft
from podium.utils.dataset_text import (
    ChatOptions,
    PromptEncoder,
    RowError,
    digest_rows,
    is_chat,
    kind_of,
    response_ids,
)
from podium.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIDES = ("chosen", "rejected")


class PreferenceDataset:
    """Pairs of responses, of which one is preferred; each is tokenized as a policy would have written it.

    `prompt_key` is a string or a chat list. A response is a string, or a chat list that ends with an assistant message:
    what comes before that message belongs to the prompt, so that whole conversations need no prompt column
    (``prompt_key=None``). The prompt goes through `PromptEncoder`, the response follows with end-of-sequence, so a
    score is taken where PPO takes it. `margin_key` names a column of numbers: by how much the chosen one is better.

    ``dataset[i]`` is a dict: ``chosen`` and ``rejected``, each with ``input_ids`` and ``prompt_length`` as in
    `SFTDataset`; ``margin`` (float, 0 without the column); ``index``.

    Raises:
        UserError: as `SFTDataset`; with file and row.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        prompt_key: str | None = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        margin_key: str | None = None,
        max_prompt_length: int,
        max_response_length: int,
        truncation: str = "error",
        chat: ChatOptions | None = None,
        key: str = "data.train_files",
    ):
        self._tokenizer = tokenizer
        self._widths = max_prompt_length, max_response_length
        self._limits = PartLimits(max_prompt_length, max_response_length, truncation)
        self._columns = dict(zip(SIDES, (chosen_key, rejected_key), strict=True))
        rows = RowReader(files, key=key)
        for name, option in (
            (prompt_key, "prompt_key"),
            (chosen_key, "chosen_key"),
            (rejected_key, "rejected_key"),
            (margin_key, "margin_key"),
        ):
            if name is not None:
                rows.require(name, f"data.{option}")
        prompts = list(rows.column(prompt_key)) if prompt_key is not None else [None] * len(rows)
        self._sides: dict[str, list[tuple[np.ndarray, int]]] = {}
        cut = np.zeros(len(rows), dtype=bool)
        try:
            for side, column in self._columns.items():
                split = [
                    _split(row, prompt, answer, column)
                    for row, (prompt, answer) in enumerate(zip(prompts, rows.column(column), strict=True))
                ]
                self._sides[side], was_cut = self._encode(split, prompt_key, column, chat)
                cut |= was_cut
            self._margins = _margins(rows, margin_key)
        except RowError as error:
            raise UserError(f"{rows.where(error.row)}: {error.reason}") from error
        self.report = DataReport(kept=len(rows), dropped=0, truncated=int(cut.sum()))

    def _encode(
        self, split: list[tuple[Any, str]], prompt_key: str | None, column: str, chat: ChatOptions | None
    ) -> tuple[list[tuple[np.ndarray, int]], np.ndarray]:
        encoder = PromptEncoder(self._tokenizer, prompt_key or column, chat)
        sides, cut = [], []
        for row, (prompt, (_, text)) in enumerate(zip(encoder(prompt for prompt, _ in split), split, strict=True)):
            ids, was_cut = self._limits.apply(row, prompt, response_ids(self._tokenizer, text, row, column))
            sides.append(ids)
            cut.append(was_cut)
        return sides, np.array(cut)

    def __len__(self) -> int:
        return len(self._margins)

    def fingerprint(self) -> str:
        """As of a `PromptDataset`, of both sides and the margins."""
        return digest_rows([*(ids for side in SIDES for ids, _ in self._sides[side]), np.asarray(self._margins)])

    def __getitem__(self, item: int) -> dict[str, Any]:
        row: dict[str, Any] = {"margin": self._margins[item], "index": item}
        for side in SIDES:
            ids, prompt_length = self._sides[side][item]
            row[side] = {"input_ids": ids.tolist(), "prompt_length": prompt_length}
        return row

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """See `collate_pairs`."""
        return collate_pairs(rows, self._tokenizer.pad_token_id, *self._widths)


def _split(row: int, prompt: Any, answer: Any, column: str) -> tuple[Any, str]:
    """What is asked, and the text that answers it."""
    if isinstance(answer, str):
        return prompt, answer
    if not is_chat(answer) or answer[-1]["role"] != "assistant":
        raise RowError(
            row,
            f"column '{column}' is {kind_of(answer)}; expected a string, or a list of messages {{role, content}} of "
            "which the last is the assistant's",
        )
    if prompt is not None and not is_chat(prompt):
        raise RowError(row, f"column '{column}' is a chat, but the prompt is {kind_of(prompt)}; make both the same")
    return [*(prompt or []), *answer[:-1]], answer[-1]["content"]


def _margins(rows: RowReader, margin_key: str | None) -> list[float]:
    if margin_key is None:
        return [0.0] * len(rows)
    margins = []
    for row, value in enumerate(rows.column(margin_key)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise RowError(row, f"column '{margin_key}' is {value!r}; expected a finite number")
        margins.append(float(value))
    return margins


def collate_pairs(
    rows: Sequence[Mapping[str, Any]], pad_token_id: int, max_prompt_length: int, max_response_length: int
) -> dict[str, torch.Tensor]:
    """Pairs of a `PreferenceDataset` as one batch of 2 B rows: chosen, rejected, chosen, rejected, ...

    Returns:
        The columns of `collate_sft`, and ``margins`` (2 B,) float32, alike in both rows of a pair.
    """
    sides = [row[side] for row in rows for side in SIDES]
    margins = torch.tensor([row["margin"] for row in rows], dtype=torch.float32).repeat_interleave(len(SIDES))
    return {**collate_sft(sides, pad_token_id, max_prompt_length, max_response_length), "margins": margins}
