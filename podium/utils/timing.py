"""Wall-clock time by phase."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class PhaseTimer:
    """Adds up seconds by phase: ``with timer("gen"): ...``; `pop` hands them out as metrics.

    A phase entered twice adds up; phases may nest, and then the outer one includes the inner. A phase that raises is
    counted too.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """``{"timing_s/<phase>": seconds}`` since the last `pop`, in order of first entry; starts again."""
        metrics = {f"timing_s/{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
