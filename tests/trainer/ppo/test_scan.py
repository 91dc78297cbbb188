import pytest
import torch

from podium.trainer.ppo.scan import discounted_suffix_sum


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 1025, 2100])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999, 1.0])
def test_equals_the_recursion(length, decay):
    values = torch.randn(2, length, dtype=torch.float64)
    expected, running = torch.zeros_like(values), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(length)):
        running = expected[:, t] = values[:, t] + decay * running
    torch.testing.assert_close(discounted_suffix_sum(values, decay), expected, rtol=1e-12, atol=1e-12)
