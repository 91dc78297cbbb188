"""Which checkpoint a run goes on from, and when it may not."""

from pathlib import Path
from typing import Any

import pytest

from podium.trainer.config.supervised import SupervisedTrainerConfig
from podium.trainer.resume import Resume, check_resume, find_resume, is_finished, metrics_from, read_checkpoint
from podium.utils.checkpoint import beside, mark, publish, seal, step_folder, write_manifest
from podium.utils.errors import UserError


def save(run_dir: Path, step: int) -> None:
    final = step_folder(run_dir, step)
    folder = beside(final)
    (folder / "weights").write_text("x" * step)
    content = {"step": step, "driver": {"fingerprint": "f"}, "config": {}}
    write_manifest(folder, seal([folder / "weights"], folder), content)
    publish(folder, final)
    mark(run_dir, step)


def step(run_dir: Path, mode: str = "auto", path: Path | None = None) -> int | None:
    found = find_resume(
        SupervisedTrainerConfig(
            resume_mode=mode, resume_from_path=str(path) if path else None, default_local_dir=str(run_dir)
        )
    )
    return None if found is None else found.step


def test_auto(tmp_path, capsys):
    assert step(tmp_path / "nowhere") is None and step(tmp_path) is None
    for number in (1, 2, 3):
        save(tmp_path, number)
    assert step(tmp_path) == 3
    mark(tmp_path, 2)  # taken back
    assert step(tmp_path) == 2 and capsys.readouterr().err == ""
    (tmp_path / "global_step_2" / "weights").write_text("y")
    assert step(tmp_path) == 1
    said = capsys.readouterr().err
    assert "passing over a damaged checkpoint" in said and "global_step_2/weights has 1 bytes; 2 were written" in said
    (tmp_path / "global_step_1" / "weights").write_text("y")
    with pytest.raises(UserError, match=r"no whole checkpoint is left to go on from .*global_step_2/weights"):
        step(tmp_path)


def test_a_checkpoint_counts_before_anything_is_marked(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert step(tmp_path) == 1


def test_disable(tmp_path):
    assert step(tmp_path, "disable") is None
    save(tmp_path, 4)
    with pytest.raises(UserError, match=r"holds checkpoints of another run .up to global_step_4."):
        step(tmp_path, "disable")


def test_resume_path(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    save(old, 1)
    save(old, 2)
    assert step(new, "resume_path", old / "global_step_1") == 1
    assert step(new, "resume_path", old) == 2
    assert step(old, "resume_path", old / "global_step_1") == 1
    save(new, 7)
    with pytest.raises(UserError, match=r"holds checkpoints of its own .up to global_step_7."):
        step(new, "resume_path", old)
    with pytest.raises(UserError, match="is no checkpoint"):
        step(tmp_path / "third", "resume_path", tmp_path)
    (old / "global_step_2" / "weights").unlink()
    with pytest.raises(UserError, match=r"global_step_2/weights is missing"):
        step(old, "resume_path", old)


def test_a_checkpoint_moved_to_another_disk_is_still_the_run_s(tmp_path):
    run_dir = tmp_path / "run"
    save(run_dir, 1)
    (run_dir / "global_step_1").rename(tmp_path / "moved")
    (run_dir / "global_step_1").symlink_to(tmp_path / "moved")
    (tmp_path / "link").symlink_to(run_dir)
    for name in (run_dir, tmp_path / "link"):  # the run directory itself may be a link, too
        found = find_resume(SupervisedTrainerConfig(default_local_dir=str(name)))
        assert found is not None and found.folder == run_dir / "global_step_1"
        assert metrics_from(found, run_dir) == 1


BEFORE: dict[str, Any] = {
    "data": {"train_batch_size": 16, "seed": 1},
    "optim": {"lr": 0.1},
    "trainer": {"total_training_steps": 3},
}
RESUME = Resume(Path("/runs/a/global_step_3"), 3, {"fingerprint": "f"}, BEFORE)


def with_(**changes: Any) -> dict[str, Any]:
    return {name: {**values, **changes.get(name, {})} for name, values in BEFORE.items()}


def test_what_must_not_change():
    assert check_resume(RESUME, BEFORE, "f") == {}
    with pytest.raises(UserError, match=r"data.train_batch_size was 16 and is now 32"):
        check_resume(RESUME, with_(data={"train_batch_size": 32}), "f")
    with pytest.raises(UserError, match=r"data.train_files has other rows"):
        check_resume(RESUME, BEFORE, "g")
    for key, value in (("train_weights", [1.0, 2.0]), ("sampler", {"path": "mine.py", "name": "Mine"})):
        with pytest.raises(UserError, match=rf"data.{key}\S* was None and is now "):
            check_resume(RESUME, with_(data={key: value}), "f")
    assert check_resume(RESUME, with_(optim={"lr": 0.2}), "f") == {"optim.lr": (0.1, 0.2)}
    assert check_resume(RESUME, with_(trainer={"default_local_dir": "b", "resume_mode": "disable"}), "f") == {}


def test_the_end():
    assert is_finished(RESUME, {}, 3) and not is_finished(RESUME, {}, 4)
    shorter = check_resume(RESUME, with_(trainer={"total_training_steps": 2}), "f")
    assert is_finished(RESUME, shorter, 2)
    other = check_resume(RESUME, with_(optim={"lr": 0.2}), "f")
    assert not is_finished(RESUME, other, 4)
    with pytest.raises(
        UserError, match=r"is finished .3 steps of 3., and was another: optim.lr was 0.1 and is now 0.2"
    ):
        is_finished(RESUME, other, 3)


def test_how_a_finished_run_is_run_watched_and_saved_may_change():
    free = {
        "preempt_grace_s": 5.0,
        "record_freq": 2,
        "max_ckpt_to_keep": 1,
        "deadlines": {"update_s": 9.0},
        "logger": [],
        "n_gpus_per_node": 2,
        "total_training_steps": 2,
    }
    assert is_finished(RESUME, check_resume(RESUME, with_(trainer=free), "f"), 2)
    for key, value in (("seed", 1), ("critic_warmup", 2), ("plugins", ["mine.py"])):
        with pytest.raises(UserError, match=f"was another: trainer.{key} was None and is now"):
            is_finished(RESUME, check_resume(RESUME, with_(trainer={key: value}), "f"), 3)


def test_lines_of_metrics_belong_to_the_run_of_the_same_directory():
    assert metrics_from(None, Path("/runs/a")) is None
    assert metrics_from(RESUME, Path("/runs/a")) == 3 and metrics_from(RESUME, Path("/runs/b")) is None


def test_who_only_reads_leaves_a_save_that_is_under_way_alone(tmp_path):
    """An export or a replay of a run that is still going on."""
    save(tmp_path, 1)
    beside(step_folder(tmp_path, 2))
    assert read_checkpoint(tmp_path).step == 1
    assert step(tmp_path / "other", "resume_path", tmp_path) == 1
    assert (tmp_path / "global_step_2.tmp").is_dir()
    assert step(tmp_path) == 1 and not (tmp_path / "global_step_2.tmp").exists(), "its own run clears it"
