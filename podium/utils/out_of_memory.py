"""Running out of memory, told with the size of what was computed."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CPU = "DefaultCPUAllocator"  # torch has no class of its own for its failures
_TRIED = re.compile(r"tried to allocate [\d.]+ \w+", re.IGNORECASE)


class OutOfMemoryError(RuntimeError):
    """There was not enough memory; the message says for what."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says so: torch's on CUDA, torch's on a CPU, Python's, or `OutOfMemoryError`."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and _CPU in str(error))


def what_was_tried(error: BaseException) -> str:
    """How much was to be allocated, where the error says it; else what `OutOfMemoryError` says."""
    if isinstance(error, OutOfMemoryError):
        return str(error)
    tried = _TRIED.search(str(error))
    return tried[0][0].lower() + tried[0][1:] if tried else ""


@contextmanager
def micro_batch_of(size: Callable[[], tuple[int, int, int]]) -> Iterator[None]:
    """Where memory runs out inside, says for which micro-batch.

    Args:
        size: gives its rows, the tokens of all rows without padding, and the width of a row with it; called then only.

    Raises:
        OutOfMemoryError: memory has run out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        tried, (rows, tokens, width) = what_was_tried(error), size()
        text = f"a micro-batch of {rows} rows, {tokens} tokens ({rows * width} with padding)"
        raise OutOfMemoryError(f"{text}{f'; {tried}' if tried else ''}") from error
