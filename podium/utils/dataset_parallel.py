"""Rendering and tokenizing prompts in several processes: templates run in Python, one core at a time."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from podium.utils.dataset_text import ROWS_AT_ONCE, PromptEncoder, RowError

_BLOCK_TIMEOUT_S = 600.0
_encoder: PromptEncoder | None = None


def encode_prompts(encoder: PromptEncoder, prompts: Iterable[Any], workers: int) -> Iterator[np.ndarray]:
    """Token ids (int32) of each prompt, in order, whatever the number of processes.

    Raises:
        RowError: the first bad prompt.
    """
    if workers == 1:
        yield from (np.asarray(ids, dtype=np.int32) for ids in encoder(prompts))
        return
    numbered = enumerate(prompts)
    # Not a fork: the driver may have threads by now, of torch, pyarrow or the tokenizer.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(encoder,)) as pool:
        running: list[Future[list[np.ndarray] | RowError]] = []
        while block := list(islice(numbered, ROWS_AT_ONCE)):
            running.append(pool.submit(_encode, block[0][0], [prompt for _, prompt in block]))
            if len(running) > 2 * workers:
                yield from _result(running.pop(0))
        for future in running:
            yield from _result(future)


def _start(encoder: PromptEncoder) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder


def _encode(first_row: int, prompts: list[Any]) -> list[np.ndarray] | RowError:
    assert _encoder is not None
    try:
        return [np.asarray(ids, dtype=np.int32) for ids in _encoder(prompts, first_row)]
    except RowError as error:
        return RowError(error.row, error.reason)  # without its cause, which may not pickle


def _result(future: Future[list[np.ndarray] | RowError]) -> list[np.ndarray]:
    result = future.result(timeout=_BLOCK_TIMEOUT_S)
    if isinstance(result, RowError):
        raise result
    return result
