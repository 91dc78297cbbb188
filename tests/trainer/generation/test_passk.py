import itertools

import pytest

from podium.trainer.generation.passk import default_ks, mean_pass_at_k, pass_at_k


def test_it_is_the_share_of_all_draws_with_a_right_one():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_large_numbers_do_not_overflow():
    assert pass_at_k(1000, 1, 100) == pytest.approx(0.1)


def test_prompts_with_too_few_responses_are_left_out():
    assert mean_pass_at_k([(4, 4), (1, 0)], 2) == 1.0
    assert mean_pass_at_k([(1, 1)], 2) is None
    assert default_ks(1) == [1] and default_ks(9) == [1, 2, 4, 8]
