"""Checkpoint folders: damage is found and named, and a crash at any place leaves a whole one."""

import os
import random
import shutil
from pathlib import Path

import pytest

from podium.utils.checkpoint import (
    LATEST,
    DamagedCheckpointError,
    beside,
    mark,
    marked,
    prune,
    publish,
    recover,
    require_space,
    seal,
    step_folder,
    step_of,
    steps,
    verify,
    write_manifest,
)
from podium.utils.errors import UserError


def save(run_dir: Path, step: int, text: str = "x") -> Path:
    """A checkpoint of two files."""
    final = step_folder(run_dir, step)
    folder = beside(final)
    (folder / "actor").mkdir()
    files = [folder / "actor" / "weights", folder / "actor" / "empty"]
    files[0].write_text(text * 100)
    files[1].touch()
    write_manifest(folder, seal(files, folder), {"step": step})
    publish(folder, final)
    mark(run_dir, step)
    return final


def test_every_flipped_bit_and_every_truncation_is_found(tmp_path):
    folder = save(tmp_path, 1)
    assert verify(folder)["step"] == 1
    rng = random.Random(0)
    for file in [folder / "actor" / "weights", folder / "manifest.json", folder / "manifest.sha256"]:
        whole = file.read_bytes()
        for _ in range(60):
            flipped = bytearray(whole)
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(UserError, match=str(folder)):
                verify(folder)
            file.write_bytes(whole[: rng.randrange(len(whole) - 1)])
            with pytest.raises(DamagedCheckpointError, match=str(folder)):
                verify(folder)
        file.write_bytes(whole)
    assert verify(folder)["step"] == 1
    (folder / "actor" / "empty").unlink()
    with pytest.raises(DamagedCheckpointError, match="actor/empty is missing"):
        verify(folder)
    with pytest.raises(DamagedCheckpointError, match=r"has no manifest.json"):
        verify(tmp_path)


def test_a_later_format_is_said_to_be_one(tmp_path, monkeypatch):
    monkeypatch.setattr("podium.utils.checkpoint._FORMAT", 3)
    folder = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(UserError, match="checkpoint format 3; this version of Podium reads 2"):
        verify(folder)


class Crash(BaseException):
    """The machine loses power."""


def crash_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """The (count + 1)-th change of a name on the disk never happens, nor does anything after it."""
    left = [count]

    def guarded(original):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return original(*args, **kwargs)

        return call

    for owner, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (Path, "mkdir")):
        patch.setattr(owner, name, guarded(getattr(owner, name)))


@pytest.mark.parametrize("same_step", [True, False])
def test_a_crash_anywhere_leaves_a_whole_checkpoint(tmp_path, same_step):
    step, count, crashed = 1 if same_step else 2, 0, True
    while crashed:
        run_dir = tmp_path / str(count)
        save(run_dir, 1, "old")
        with pytest.MonkeyPatch.context() as patch:
            crash_after(count, patch)
            try:
                save(run_dir, step, "new")
                prune(run_dir, [step])
                crashed = False
            except Crash:
                pass
        recover(run_dir)
        newest = marked(run_dir)
        assert newest is not None
        verify(step_folder(run_dir, newest))
        assert {path.suffix for path in run_dir.iterdir() if path.is_dir()} == {""}, "nothing half-done is left"
        count += 1
    assert count > 6 and (step_folder(run_dir, step) / "actor" / "weights").read_text().startswith("new")


def test_steps_and_markers(tmp_path):
    assert steps(tmp_path / "nowhere") == [] and marked(tmp_path) is None
    for step in (10, 9, 2):
        save(tmp_path, step)
    (tmp_path / "global_step_x").mkdir()
    assert steps(tmp_path) == [2, 9, 10] and marked(tmp_path) == 2
    assert step_of(Path("global_step_12")) == 12 and step_of(Path("global_step_12.tmp")) is None
    prune(tmp_path, [9, 10])
    assert steps(tmp_path) == [9, 10]
    (tmp_path / LATEST).write_text("")
    with pytest.raises(DamagedCheckpointError, match="names no step"):
        marked(tmp_path)


def move_away(run_dir: Path, step: int, to: Path) -> Path:
    """Moves a checkpoint to another place, and leaves a link."""
    folder, to = step_folder(run_dir, step), to / f"moved_{step}"
    folder.rename(to)
    folder.symlink_to(to)
    return to


def test_of_a_checkpoint_that_is_a_link_the_link_alone_is_deleted(tmp_path, capsys):
    run_dir, other_disk = tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    other_disk.mkdir()
    for step in (1, 2, 3):
        save(run_dir, step, "old")
    moved = [move_away(run_dir, step, other_disk) for step in (1, 2, 3)]
    prune(run_dir, [2, 3])
    assert steps(run_dir) == [2, 3]
    save(run_dir, 2, "new")  # it replaces the link
    moved[2].rename(tmp_path / "gone")
    save(run_dir, 3, "new")  # and one that leads nowhere
    recover(run_dir)
    assert not list(run_dir.glob("*.tmp")) and not list(run_dir.glob("*.old"))
    assert verify(step_folder(run_dir, 2)) and verify(step_folder(run_dir, 3)) and capsys.readouterr().err == ""
    assert all(verify(folder) for folder in (moved[0], moved[1], tmp_path / "gone"))


def test_recovery_deletes_links_that_a_crash_left(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    moved = move_away(tmp_path, 2, tmp_path)
    (tmp_path / "global_step_2").rename(tmp_path / "global_step_2.tmp")
    (tmp_path / "global_step_1.old").symlink_to(moved)
    recover(tmp_path)
    assert steps(tmp_path) == [1] and verify(moved) and not list(tmp_path.glob("global_step_*.*"))


def test_what_cannot_be_deleted_is_named_and_ends_nothing(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "global_step_1.tmp").write_text("in the way")
    prune(tmp_path, [3])
    assert f"{tmp_path}/global_step_1 is no longer kept, and was not deleted: " in capsys.readouterr().err
    assert steps(tmp_path) == [1, 3]


def test_space(tmp_path):
    require_space(tmp_path, 1)
    with pytest.raises(OSError, match=r"a checkpoint takes 1e\+03 TB, and .* free"):
        require_space(tmp_path, 10**15)


def test_everything_is_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    folder = save(tmp_path, 1)
    names = {Path(path).name for path in synced}
    assert {"weights", "empty", "manifest.json", "actor", folder.name + ".tmp", tmp_path.name} <= names
