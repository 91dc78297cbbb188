"""Random states through JSON."""

import json
import random

import numpy as np
import torch

from podium.utils.random_state import random_state, set_random_state


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_what_is_drawn_next_comes_again():
    seed(1)
    draw()  # gauss and randn keep the second of a pair
    state = json.loads(json.dumps(random_state()))
    ahead = [draw(), draw()]
    seed(9)
    assert [draw(), draw()] != ahead
    set_random_state(state)
    assert [draw(), draw()] == ahead
