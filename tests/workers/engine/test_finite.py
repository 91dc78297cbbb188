"""No NaN reaches a checkpoint; nothing that is only large is taken for one."""

import pytest
import torch

from podium.workers.engine.finite import NotFiniteError, require_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [[torch.nan], [torch.inf, -torch.inf], [-torch.inf]])
def test_the_first_tensor_that_is_not_finite_is_named(dtype: torch.dtype, values: list[float]):
    bad = torch.ones(4, 6, dtype=dtype)
    bad.view(-1)[-len(values) :] = torch.tensor(values, dtype=dtype)
    with pytest.raises(NotFiniteError, match=f"^{len(values)} of the 24 numbers of second are not finite$"):
        require_finite([("first", torch.ones(3, dtype=dtype)), ("second", bad), ("third", bad)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_can_be_saved(dtype: torch.dtype):
    largest = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert largest.sum().isinf(), "what would be taken for infinity"
    require_finite([("large", largest), ("empty", torch.empty(0, dtype=dtype)), ("integers", torch.arange(3))])
