"""When a checkpoint counts, what a failed save leaves, and which are kept. The roles here write one small file each."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from podium.trainer.checkpoint import CheckpointError, Checkpoints
from podium.trainer.config.shared import CheckpointConfig
from podium.trainer.config.supervised import SupervisedTrainerConfig
from podium.trainer.resume import find_resume
from podium.utils.checkpoint import BEST, LATEST, marked, seal, steps, verify


class Role:
    """Writes its text to one file: at once, or, in the background, when `write` is called."""

    def __init__(self, text: str = "w"):
        self.text, self.fails, self.size = text, False, 1
        self._folder: Path | None = None
        self._written = True

    def checkpoint_bytes(self) -> list[int]:
        return [self.size]

    def save_checkpoint(self, path: str, background: bool = False) -> None:
        self._folder = Path(path)
        self._folder.mkdir()
        self._written = not background
        if not background:
            self.write()

    def write(self) -> None:
        assert self._folder is not None
        (self._folder / "weights").write_text(self.text)
        self._written = True

    def saved_files(self, wait: bool = True) -> list[Any]:
        assert self._folder is not None
        if self.fails:
            raise OSError("No space left on device")
        if wait and not self._written:
            self.write()
        return [seal([self._folder / "weights"], self._folder.parent) if self._written else None]

    def end_saving(self) -> None:
        if not self._written:
            self.write()

    def load_checkpoint(self, path: str) -> None:
        self.text = (Path(path) / "weights").read_text()


def make(run_dir: Path, role: Role, **settings: Any) -> Checkpoints:
    return Checkpoints(run_dir, CheckpointConfig(**settings), {"actor": role}, {"a": {"b": 1}})  # type: ignore[dict-item]


def save(checkpoints: Checkpoints, step: int, score: float | None = None, **kwargs: Any) -> None:
    checkpoints.begin(step, {"kl": 0.1}, **kwargs)
    checkpoints.commit({"loss": 1.0} if score is None else {"val/score/mean": score})


def test_a_checkpoint_is_whole_or_not_there(tmp_path):
    role = Role("three")
    checkpoints = make(tmp_path, role)
    checkpoints.begin(3, {"kl": 0.1})
    assert steps(tmp_path) == [] and marked(tmp_path) is None, "it counts when the step's metrics are written"
    checkpoints.commit({})
    assert steps(tmp_path) == [3] and marked(tmp_path) == 3
    manifest = verify(tmp_path / "global_step_3")
    assert manifest["driver"]["kl"] == 0.1 and manifest["config"] == {"a": {"b": 1}} and manifest["step"] == 3
    assert list(manifest["files"]) == ["actor/weights"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", LATEST]


def test_a_failed_save_leaves_the_one_before_and_says_so(tmp_path, capsys):
    role = Role()
    checkpoints = make(tmp_path, role)
    save(checkpoints, 1)
    role.fails = True
    save(checkpoints, 2)
    assert checkpoints.metrics() == {"perf/checkpoint_failures": 1}
    said = capsys.readouterr().err
    assert (
        "step 2 was not saved: No space left on device" in said and "goes on from" in said and "global_step_1" in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST]
    with pytest.raises(CheckpointError, match=r"the last checkpoint \(step 3\) was not saved: No space left"):
        save(checkpoints, 3, final=True)
    role.fails = False
    save(checkpoints, 3, final=True)
    assert steps(tmp_path) == [1, 3] and marked(tmp_path) == 3


def test_a_failed_save_waits_for_whoever_still_writes(tmp_path):
    """What they write later would lie in the way of the next save."""
    failing, slow = Role(), Role()
    failing.fails = True
    roles = {"actor": failing, "critic": slow}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(async_save=True), roles, {})  # type: ignore[arg-type]
    save(checkpoints, 1)
    assert slow._written and checkpoints.failures == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("settings", [{}, {"async_save": True}])
def test_what_ends_a_run_before_its_step_is_logged_takes_the_save_with_it(tmp_path, settings):
    """It would count without a line in metrics.jsonl, and a last step without its export."""
    with pytest.raises(KeyboardInterrupt), make(tmp_path, Role(), **settings) as checkpoints:
        save(checkpoints, 1)
        checkpoints.begin(2, {})
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST] and marked(tmp_path) == 1
    with pytest.raises(KeyboardInterrupt), make(tmp_path, Role(), **settings) as checkpoints:
        save(checkpoints, 2)  # with async_save it is still being written
        raise KeyboardInterrupt
    assert steps(tmp_path) == [1, 2] and marked(tmp_path) == 2


def test_a_folder_that_cannot_be_made_is_a_failed_save(tmp_path, capsys):
    checkpoints = make(tmp_path, Role())
    (tmp_path / "global_step_1.tmp").touch()
    save(checkpoints, 1)
    assert checkpoints.failures == 1 and "step 1 was not saved" in capsys.readouterr().err
    save(checkpoints, 2)
    assert steps(tmp_path) == [2]


def test_a_nan_is_no_score_and_a_metric_that_is_not_there_is_told(tmp_path, capsys):
    checkpoints = make(tmp_path, Role(), best_ckpt_metric="val/score/mean")
    for step, score in ((1, math.nan), (2, 0.1), (3, math.nan)):
        save(checkpoints, step, score)
    assert (tmp_path / BEST).read_text() == "2\n"
    checkpoints = make(tmp_path, Role(), best_ckpt_metric="val/scores/mean")
    save(checkpoints, 4, 0.1)
    assert "best_ckpt_metric=val/scores/mean is no metric of this step" in (said := capsys.readouterr().err)
    assert "did you mean val/score/mean?" in said


def test_space_is_looked_for_first(tmp_path, capsys):
    role = Role()
    role.size = 10**18
    save(make(tmp_path, role), 1)
    assert "a checkpoint takes 1e+06 TB" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_same_step_again_replaces_it(tmp_path):
    for text in ("old", "new"):
        save(make(tmp_path, Role(text)), 1)
    assert (tmp_path / "global_step_1" / "actor" / "weights").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST]


def test_in_the_background_it_counts_once_it_is_written(tmp_path):
    role = Role()
    with make(tmp_path, role, async_save=True) as checkpoints:
        save(checkpoints, 1)
        checkpoints.commit({})
        assert steps(tmp_path) == []
        role.write()
        checkpoints.commit({})
        assert steps(tmp_path) == [1]
        save(checkpoints, 2)
        save(checkpoints, 3)  # after the one before it
        assert steps(tmp_path) == [1, 2]
    assert steps(tmp_path) == [1, 2, 3], "the end of the run waits"
    with make(tmp_path, role, async_save=True) as checkpoints:
        save(checkpoints, 4, final=True)
        assert steps(tmp_path) == [1, 2, 3, 4], "the last is not written in the background"


def test_the_newest_and_the_best_are_kept(tmp_path):
    settings = {"max_ckpt_to_keep": 2, "best_ckpt_metric": "val/score/mean"}
    checkpoints = make(tmp_path, Role(), **settings)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.3), (4, None), (5, 0.5)):
        save(checkpoints, step, score)
    assert steps(tmp_path) == [2, 4, 5] and (tmp_path / BEST).read_text() == "2\n"
    # A run that goes on knows the best of before.
    checkpoints = make(tmp_path, Role(), **settings)
    save(checkpoints, 6, 0.8)
    assert steps(tmp_path) == [2, 5, 6]
    save(checkpoints, 7, 0.95)
    assert steps(tmp_path) == [6, 7]
    lowest = make(tmp_path / "low", Role(), **settings, best_ckpt_mode="min")
    for step, score in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.4)):
        save(lowest, step, score)
    assert steps(tmp_path / "low") == [2, 3, 4]


def test_a_run_that_is_taken_back_goes_on_from_there(tmp_path):
    role = Role("one")
    checkpoints = make(tmp_path, role)
    save(checkpoints, 1)
    role.text = "two"
    save(checkpoints, 2)
    random.seed(5)
    settings = SupervisedTrainerConfig(
        resume_mode="resume_path",
        resume_from_path=str(tmp_path / "global_step_1"),
        default_local_dir=str(tmp_path),
    )
    resume = find_resume(settings)
    assert resume is not None
    make(tmp_path, role).load(resume)
    assert role.text == "one" and marked(tmp_path) == 1
    assert json.loads((tmp_path / "global_step_1" / "manifest.json").read_text())["driver"]["random"]["python"][0] == 3
