"""Updates that are not made: counted, kept, and too many of them the end."""

import pytest
import torch

from podium.protocol import DataProto
from podium.trainer.ppo.bad_steps import BadSteps
from podium.trainer.ppo.bundles import load_bundle
from podium.utils.errors import UserError

GOOD, BAD, EMPTY = {"loss": 1.0}, {"skipped": 1.0}, {"empty": 1.0}


def batch(value: float, at: int = 0) -> DataProto:
    advantages = torch.zeros(2, 3)
    advantages[1, at] = value
    mask = torch.tensor([[True, True, True], [True, False, False]])
    return DataProto.from_dict({"advantages": advantages, "response_mask": mask, "input_ids": torch.ones(2, 5).long()})


def test_what_is_kept_comes_back(tmp_path, capsys):
    steps = BadSteps(tmp_path, 3)
    assert steps.note("actor", 4, batch(1.0), [GOOD, EMPTY]) == {"actor/skipped_steps": 0, "actor/empty_steps": 1}
    assert not list(tmp_path.iterdir())
    assert steps.note("actor", 5, batch(torch.inf), [GOOD, BAD, GOOD])["actor/skipped_steps"] == 1
    path = tmp_path / "bad_steps" / "step_5_actor.safetensors"
    said = capsys.readouterr().err
    assert "step 5: 1 of 3 updates of the actor" in said and str(path) in said
    assert "advantages has 1 values that are not finite, the first in row 1, token 0" in said
    kept = load_bundle(path)
    assert (kept.step, kept.role, kept.bad_updates) == (5, "actor", [1])
    assert torch.equal(kept.batch.batch["advantages"], batch(torch.inf).batch["advantages"])


def test_too_many_in_a_row(tmp_path):
    steps = BadSteps(tmp_path, 3)
    for updates in ([BAD, BAD, GOOD], [BAD], [BAD]):
        steps.note("actor", 1, batch(0), updates)
    steps.note("critic", 1, batch(0), [BAD])
    with pytest.raises(UserError, match=r"3 updates of the actor in a row were not finite .trainer.max_bad_steps=3."):
        steps.note("actor", 2, batch(0), [BAD])
