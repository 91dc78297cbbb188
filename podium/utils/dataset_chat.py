"""Whole conversations for supervised fine-tuning, and documents packed into rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podium.utils.chat_masks import AssistantMasks
from podium.utils.data_files import RowReader
from podium.utils.dataset import DataReport
from podium.utils.dataset_text import (
    ChatOptions,
    RowError,
    check_truncation,
    digest_rows,
    kind_of,
    pad_rows,
    truncate_ids,
)
from podium.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatDataset:
    """Conversations, of which the assistant's turns are learnt.

    The column holds a list of messages, each with a ``role``; which tokens are the assistant's, `AssistantMasks` says.
    With truncation other than ``error``, conversations of which no such token is left are dropped, and counted.

    ``dataset[i]`` is a dict: ``input_ids`` (list of ints, at most `max_length`), ``loss_mask`` (list of bools, the
    first False: nothing predicts it), ``index``.

    Raises:
        UserError: as `PromptDataset`, a conversation without an assistant's turn, or tokens that cannot be told apart.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        messages_key: str = "messages",
        max_length: int,
        truncation: str = "error",
        chat: ChatOptions | None = None,
        key: str = "data.train_files",
    ):
        check_truncation(truncation)
        rows = RowReader(files, key=key)
        rows.require(messages_key, "data.messages_key")
        self._pad, self.width = tokenizer.pad_token_id, max_length
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        masks = AssistantMasks(tokenizer, messages_key, chat)
        dropped = truncated = 0
        try:
            for row, messages in enumerate(rows.column(messages_key)):
                ids, mask = masks(row, _checked(row, messages, messages_key))
                mask[0] = False
                if len(ids) > max_length:
                    if truncation == "error":
                        raise RowError(
                            row,
                            f"the conversation has {len(ids)} tokens, data.max_length is {max_length}; raise it, or "
                            "set data.truncation",
                        )
                    kept = truncate_ids(range(len(ids)), max_length, truncation)
                    ids, mask = [ids[i] for i in kept], [mask[i] for i in kept]
                    mask[0] = False
                    if not any(mask):
                        dropped += 1
                        continue
                    truncated += 1
                self._rows.append((np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=bool)))
        except RowError as error:
            raise UserError(f"{rows.where(error.row)}: {error.reason}") from error
        if not self._rows:
            raise UserError(
                f"{key}={', '.join(rows.files)}: no conversation has an assistant's token within max_length"
            )
        self.report = DataReport(kept=len(self._rows), dropped=dropped, truncated=truncated)

    def __len__(self) -> int:
        return len(self._rows)

    def fingerprint(self) -> str:
        """As of a `PromptDataset`, with what is learnt of each row."""
        return digest_rows(part for row in self._rows for part in row)

    def __getitem__(self, item: int) -> dict[str, Any]:
        ids, mask = self._rows[item]
        return {"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "index": item}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """See `collate_documents`."""
        return collate_documents([[row] for row in rows], self._pad, self.width, packed=False)


def _checked(row: int, messages: Any, column: str) -> list[dict[str, Any]]:
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and m.get("role") for m in messages):
        return messages
    raise RowError(row, f"column '{column}' is {kind_of(messages)}; expected a list of messages {{role, content}}")


class PackedDataset:
    """The documents of another data set, several in a row, so that little of a batch is padding.

    Rows are filled first-fit, longest documents first. Documents of a row do not see each other: the positions count
    anew in each, and transformers builds the attention mask from that.

    Args:
        documents: rows with ``input_ids`` and ``loss_mask``.
        width: tokens in a row; no document is longer.
    """

    def __init__(self, documents: Any, pad_token_id: int, width: int):
        self._documents, self._pad, self.width = documents, pad_token_id, width
        lengths = np.array([len(documents[i]["input_ids"]) for i in range(len(documents))])
        self._bins = first_fit(lengths, width)
        self.report = (
            f"{documents.report}, packed into {len(self._bins)} rows of {width} tokens, "
            f"{lengths.sum() / (len(self._bins) * width):.0%} full"
        )

    def __len__(self) -> int:
        return len(self._bins)

    def fingerprint(self) -> str:
        """Of the documents and their rows."""
        return digest_rows(
            [np.frombuffer(self._documents.fingerprint().encode(), np.uint8), *map(np.array, self._bins)]
        )

    def __getitem__(self, item: int) -> list[dict[str, Any]]:
        return [self._documents[i] for i in self._bins[item]]

    def collate(self, rows: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, torch.Tensor]:
        """See `collate_documents`."""
        return collate_documents(rows, self._pad, self.width, packed=True)


def first_fit(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Documents of each row, first-fit decreasing: at most 11/9 of the fewest rows possible, and one (Johnson 1973).

    A tree over the free space of all rows finds the first that fits in logarithmic time.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    free = np.full(2 * leaves, width)  # node i has the children 2 i and 2 i + 1, and the larger of their free spaces
    bins: list[list[int]] = []
    for document in np.argsort(-lengths, kind="stable"):
        assert lengths[document] <= width, (lengths[document], width)
        node = 1
        while node < leaves:
            node = 2 * node if free[2 * node] >= lengths[document] else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(int(document))
        free[node] -= lengths[document]
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bins


def collate_documents(
    rows: Sequence[Sequence[Mapping[str, Any]]], pad_token_id: int, width: int, *, packed: bool
) -> dict[str, torch.Tensor]:
    """Rows of documents as one batch in the layout of PPO batches, the "prompt" being the first token alone.

    Unpacked rows have one document and an attention mask over it. Packed rows have no padding as far as attention is
    concerned: what is free at the end counts as a document that nothing is learnt from.

    Returns:
        int64 ``prompts`` (B, 1), ``responses`` (B, W-1), ``input_ids`` and ``position_ids`` (B, W), bool
        ``attention_mask`` (B, W) and ``response_mask`` (B, W-1): the tokens to learn, with gaps.
    """
    input_ids, filled = pad_rows(
        [[token for document in row for token in document["input_ids"]] for row in rows],
        pad_token_id,
        width,
        left=False,
    )
    loss_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    position_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, documents in enumerate(rows):
        start = 0
        for document in documents:
            stop = start + len(document["input_ids"])
            loss_mask[row, start:stop] = torch.tensor(document["loss_mask"])
            loss_mask[row, start] = False  # nothing before it in its document predicts it
            position_ids[row, start:stop] = torch.arange(stop - start)
            start = stop
        position_ids[row, start:] = torch.arange(width - start)
    return {
        "prompts": input_ids[:, :1],
        "responses": input_ids[:, 1:],
        "response_mask": loss_mask[:, 1:],
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(filled) if packed else filled,
        "position_ids": position_ids,
    }
