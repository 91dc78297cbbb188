import time

import pytest

from podium.utils.timing import PhaseTimer


def test_phases_add_up_nest_and_start_again():
    timer = PhaseTimer()
    with timer("step"):
        for _ in range(2):
            with timer("gen"):
                time.sleep(0.01)
    metrics = timer.pop()
    assert metrics.keys() == {"timing_s/step", "timing_s/gen"}
    assert 0.02 <= metrics["timing_s/gen"] <= metrics["timing_s/step"]
    assert timer.pop() == {}


def test_a_phase_that_raises_is_counted():
    timer = PhaseTimer()
    with pytest.raises(ZeroDivisionError), timer("gen"):
        _ = 1 / 0
    assert "timing_s/gen" in timer.pop()
