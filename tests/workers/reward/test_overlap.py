"""Scoring beside something else that goes on."""

import time

import pytest
import torch

from podium.protocol import DataProto
from podium.utils.errors import UserError
from podium.workers.reward.functions import RewardSource
from podium.workers.reward.manager import RewardManager
from podium.workers.reward.overlap import Overlap
from podium.workers.reward.pool import ProcessPool
from podium.workers.reward.process_main import Job
from podium.workers.reward.scorers import RowScorer

SLOW = """
import time
def compute_score(solution_str, extra_info, **_):
    time.sleep(extra_info["seconds"])
    return float(solution_str)
"""


class Digits:
    eos_token_id = 99

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(map(str, row)) for row in rows]


@pytest.fixture
def manager(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(SLOW)
    pool = ProcessPool(Job(RewardSource(str(file)), "row", 60.0, 0), 2, 512, 1)
    yield RewardManager(RowScorer(pool, "slow"), Digits())
    pool.close()


def part(*digits: int, seconds: float = 0.0) -> DataProto:
    responses = torch.tensor(digits)[:, None]
    infos = [{"seconds": seconds}] * len(digits)
    return DataProto.from_dict(
        {"responses": responses, "response_mask": torch.ones_like(responses).bool()}, {"extra_info": infos}
    )


def test_parts_are_scored_meanwhile_and_come_in_the_order_of_their_rows(manager):
    with Overlap(manager) as overlap:
        overlap.put([3, 0], part(3, 0, seconds=0.2))
        overlap.put([1, 2], part(1, 2, seconds=0.2))
        until = time.monotonic() + 30
        while not (scored := all(future.done() for _, future in overlap._parts)) and time.monotonic() < until:
            time.sleep(0.05)
        assert scored, "nothing is scored before it is asked for"
        outcomes = overlap.outcomes()
    assert [outcome.score for outcome in outcomes] == [0, 1, 2, 3]
    scored = manager(part(0, 1, 2, 3), outcomes)
    assert scored.batch["token_level_scores"][:, 0].tolist() == [0, 1, 2, 3]


def test_what_interrupts_the_other_ends_the_scoring_too(manager):
    with pytest.raises(KeyboardInterrupt), Overlap(manager) as overlap:
        overlap.put([0], part(1, seconds=50.0))
        overlap.put([1], part(2, seconds=50.0))
        time.sleep(0.5)
        began = time.perf_counter()
        raise KeyboardInterrupt
    assert time.perf_counter() - began < 10
    assert [outcome.score for outcome in manager.outcomes(part(5))] == [5], "the pool can be used again"


def test_a_function_that_does_not_load_is_told(manager, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1 +")
    with pytest.raises(UserError, match="importing it fails at line 1"), Overlap(manager) as overlap:
        overlap.put([0], part(1))
        overlap.outcomes()
