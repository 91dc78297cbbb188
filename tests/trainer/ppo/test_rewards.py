import pytest
import torch

from podium.trainer.ppo.rewards import overlong_penalty
from podium.utils.errors import UserError
from podium.utils.torch_functional import place_on_last_token
from tests.trainer.ppo import ragged


def test_a_score_lands_on_the_last_valid_token_and_nowhere_else():
    mask = ragged.response_mask()
    mask[4, -3:] = False
    scores = torch.arange(1.0, ragged.ROWS + 1)
    placed = place_on_last_token(scores, mask)
    for row, valid in enumerate(mask.tolist()):
        expected = [0.0] * ragged.WIDTH
        if any(valid):
            expected[max(t for t, ok in enumerate(valid) if ok)] = scores[row].item()
        assert placed[row].tolist() == expected


def test_an_empty_response_carries_no_reward_not_even_nan():
    placed = place_on_last_token(torch.tensor([float("nan"), 2.0]), torch.tensor([[0, 0], [1, 0]]))
    assert placed.tolist() == [[0.0, 0.0], [2.0, 0.0]]


def test_overlong_penalty_falls_in_a_line_over_the_buffer():
    penalty = overlong_penalty(
        torch.tensor([0, 80, 90, 100]), max_response_length=100, buffer_len=20, penalty_factor=2.0
    )
    assert penalty.tolist() == [0.0, 0.0, -1.0, -2.0]


@pytest.mark.parametrize("buffer_len", [0, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer_len):
    with pytest.raises(UserError, match="overlong_buffer"):
        overlong_penalty(torch.tensor([1]), 100, buffer_len, 1.0)
