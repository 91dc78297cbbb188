"""Prompts with the responses to learn, for supervised fine-tuning."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podium.utils.data_files import RowReader
from podium.utils.dataset import DataReport
from podium.utils.dataset_text import (
    ChatOptions,
    PromptEncoder,
    RowError,
    check_truncation,
    digest_rows,
    pad_rows,
    response_ids,
    truncate_ids,
)
from podium.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SFTDataset:
    """Prompts and the responses to learn, tokenized one after the other; the response ends with end-of-sequence.

    The prompt is handled as in `PromptDataset`, the response is a string. Both limits are in tokens, that of the
    response includes end-of-sequence; `truncation` applies to each part by itself (a response cut on the right loses
    its end-of-sequence: it does not teach to stop there).

    ``dataset[i]`` is a dict: ``input_ids`` (prompt then response, list of ints), ``prompt_length`` and ``loss_mask``
    (the loss is on what follows the prompt), ``index``.

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
        chat: ChatOptions | None = None,
        key: str = "data.train_files",
    ):
        limits = PartLimits(max_prompt_length, max_response_length, truncation)
        self._pad, self._widths = tokenizer.pad_token_id, (max_prompt_length, max_response_length)
        rows = RowReader(files, key=key)
        rows.require(prompt_key, "data.prompt_key")
        rows.require(response_key, "data.response_key")
        prompts = PromptEncoder(tokenizer, prompt_key, chat)(rows.column(prompt_key))
        responses = (
            response_ids(tokenizer, text, row, response_key) for row, text in enumerate(rows.column(response_key))
        )
        self._rows: list[tuple[np.ndarray, int]] = []
        truncated = 0
        try:
            for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
                kept, was_cut = limits.apply(row, prompt, response)
                truncated += was_cut
                self._rows.append(kept)
        except RowError as error:
            raise UserError(f"{rows.where(error.row)}: {error.reason}") from error
        self.report = DataReport(kept=len(self._rows), dropped=0, truncated=truncated)

    def __len__(self) -> int:
        return len(self._rows)

    def fingerprint(self) -> str:
        """As of a `PromptDataset`."""
        return digest_rows(ids for ids, _ in self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        ids, prompt_length = self._rows[item]
        loss_mask = [False] * prompt_length + [True] * (len(ids) - prompt_length)
        return {"input_ids": ids.tolist(), "prompt_length": prompt_length, "loss_mask": loss_mask, "index": item}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """See `collate_sft`."""
        return collate_sft(rows, self._pad, *self._widths)


class PartLimits:
    """The two limits of a prompt with its response, in tokens, and what becomes of what is over them."""

    def __init__(self, max_prompt_length: int, max_response_length: int, truncation: str):
        check_truncation(truncation)
        self._limits = {"prompt": max_prompt_length, "response": max_response_length}
        self._truncation = truncation

    def apply(self, row: int, prompt: list[int], response: list[int]) -> tuple[tuple[np.ndarray, int], bool]:
        """``((token ids int32, tokens of the prompt), whether something was cut)``.

        Raises:
            RowError: a part over its limit, with ``truncation="error"``.
        """
        parts = {"prompt": prompt, "response": response}
        over = [part for part, ids in parts.items() if len(ids) > self._limits[part]]
        if over and self._truncation == "error":
            raise RowError(
                row,
                f"the {over[0]} has {len(parts[over[0]])} tokens, data.max_{over[0]}_length is "
                f"{self._limits[over[0]]}; raise it, or set data.truncation",
            )
        if over:
            prompt, response = (truncate_ids(ids, self._limits[part], self._truncation) for part, ids in parts.items())
        return (np.asarray(prompt + response, dtype=np.int32), len(prompt)), bool(over)


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
    prompts, prompt_mask = pad_rows([prompt for prompt, _ in split], pad_token_id, max_prompt_length, left=True)
    responses, response_mask = pad_rows(
        [response for _, response in split], pad_token_id, max_response_length, left=False
    )
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0),
    }
