import numpy as np
import pytest
import torch

from podium.trainer.ppo.sampling import needs_refill, pf_ppo_resample, rows_with_signal, take_groups
from podium.utils.errors import UserError

INDEX = np.array(["b", "a", "b", "a", "c", "c", "d"], dtype=object)
SCORES = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5, 3.0])


def test_groups_of_equal_scores_go():
    assert rows_with_signal(SCORES, INDEX).tolist() == [False, True, False, True, True, True, False]


def test_a_row_that_was_not_scored_is_no_signal():
    scores = SCORES.clone()
    scores[5] = float("nan")
    valid = torch.tensor([1, 1, 1, 1, 1, 0, 1])
    assert rows_with_signal(scores, INDEX, valid).tolist() == [False, True, False, True, False, False, False]


def test_take_groups_keeps_whole_groups_in_order_of_appearance():
    keep = torch.tensor([True, True, True, True, False, False, True])
    assert take_groups(INDEX, keep, 1).tolist() == [0, 2]
    assert take_groups(INDEX, keep, 2).tolist() == [0, 1, 2, 3]
    assert take_groups(INDEX, keep, 9).tolist() == [0, 1, 2, 3, 6]


def test_refill_until_enough_or_the_limit():
    assert not needs_refill(8, 8, 1, 10)
    assert needs_refill(7, 8, 9, 10)
    assert needs_refill(0, 8, 1000, 0)
    with pytest.raises(UserError, match="max_num_gen_batches"):
        needs_refill(7, 8, 10, 10)


@pytest.mark.parametrize(("method", "weights"), [("pow", [1, 0, 4]), ("max_min", [0, 1, 1]), ("max_random", [1, 1, 4])])
def test_pf_ppo_draws_in_proportion_to_its_weights(method, weights):
    scores = torch.tensor([1.0, 0.0, 2.0]).repeat(4000)
    rows = pf_ppo_resample(scores, method, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(rows % 3, minlength=3) / rows.numel()
    torch.testing.assert_close(share, torch.tensor(weights) / sum(weights), atol=0.02, rtol=0)


def test_pf_ppo_of_zero_scores_draws_evenly_and_names_a_wrong_method():
    assert pf_ppo_resample(torch.zeros(5)).shape == (5,)
    with pytest.raises(UserError, match="did you mean 'max_min'"):
        pf_ppo_resample(torch.zeros(5), "maxmin")
