"""pass@k of many responses to each prompt."""

import math
from collections.abc import Sequence


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """The unbiased estimator ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374).

    The probability that at least one of `k` responses, drawn without replacement from `responses` of which `passed`
    are right, is right.
    """
    assert 0 <= passed <= responses and 1 <= k <= responses, (responses, passed, k)
    return 1.0 - math.comb(responses - passed, k) / math.comb(responses, k)


def default_ks(responses: int) -> list[int]:
    """1 and the powers of two up to `responses`."""
    return [2**power for power in range(responses.bit_length()) if 2**power <= responses]


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Mean over prompts, given as (responses, passed); None where none of them has `k` responses."""
    values = [pass_at_k(responses, passed, k) for responses, passed in counts if responses >= k]
    return sum(values) / len(values) if values else None
