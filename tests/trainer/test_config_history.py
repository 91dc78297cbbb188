"""Each step's configuration, however often a run was taken up again."""

from pathlib import Path

import pytest

from podium.trainer.config_history import config_at, note_config
from podium.utils.errors import UserError


def test_a_step_has_the_configuration_that_computed_it_last(tmp_path: Path):
    note_config(tmp_path, 0, {"lr": 1})
    note_config(tmp_path, 2, {"lr": 1})  # the same: no line
    note_config(tmp_path, 4, {"lr": 2})
    assert [config_at(tmp_path, step) for step in (1, 4, 5)] == [({"lr": 1}, 0), ({"lr": 1}, 0), ({"lr": 2}, 4)]
    note_config(tmp_path, 3, {"lr": 3})  # taken up again from before the change
    assert [config_at(tmp_path, step) for step in (3, 4, 9)] == [({"lr": 1}, 0), ({"lr": 3}, 3), ({"lr": 3}, 3)]
    note_config(tmp_path, 0, {"lr": 4})
    assert config_at(tmp_path, 9) == ({"lr": 4}, 0)


def test_no_configuration(tmp_path: Path):
    note_config(tmp_path, 3, {})  # goes on from another run's checkpoint
    for run_dir, step in ((tmp_path, 3), (tmp_path / "none", 1)):
        with pytest.raises(UserError, match=f"has no configuration for step {step}"):
            config_at(run_dir, step)
