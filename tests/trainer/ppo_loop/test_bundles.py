"""Batches of updates in files: whole, found again by step, and never the end of a run."""

from pathlib import Path

import pytest
import torch

from podium.protocol import DataProto
from podium.trainer.ppo.bundles import (
    BAD,
    RECORDED,
    Bundle,
    find_bundles,
    load_bundle,
    not_finite,
    save_bundle,
    set_aside,
)
from podium.utils.errors import UserError


def bundle(role: str = "actor", step: int = 3, bad: tuple[int, ...] = ()) -> Bundle:
    columns = {
        "advantages": torch.randn(2, 3).T.contiguous().T,
        "response_mask": torch.tensor([[True] * 3, [True] * 3]),
    }
    return Bundle(step, role, DataProto.from_dict(columns), list(bad))


def test_what_is_saved_comes_back(tmp_path: Path):
    saved = bundle(bad=(1,))
    path = save_bundle(tmp_path / "new", saved)
    assert path == tmp_path / "new" / "step_3_actor.safetensors" and [*path.parent.iterdir()] == [path]
    loaded = load_bundle(path)
    assert (loaded.step, loaded.role, loaded.bad_updates) == (3, "actor", [1])
    for name, tensor in saved.batch.batch.items():
        assert torch.equal(loaded.batch.batch[name], tensor)


def test_a_step_is_found_in_the_order_of_its_updates_and_with_what_was_bad(tmp_path: Path):
    for role in ("actor", "critic"):
        save_bundle(tmp_path / RECORDED, bundle(role))
    save_bundle(tmp_path / BAD, bundle("actor", bad=(0,)))
    save_bundle(tmp_path / RECORDED, bundle("actor", step=4))
    found = find_bundles(tmp_path, 3)
    assert [(role, kept.bad_updates) for role, kept in found.items()] == [("critic", []), ("actor", [0])]
    assert list(find_bundles(tmp_path, 4)) == ["actor"] and not find_bundles(tmp_path, 5)


def test_what_is_computed_anew_is_set_aside(tmp_path: Path):
    for step in (1, 2, 3):
        save_bundle(tmp_path / BAD, bundle(step=step))
    set_aside(tmp_path, 1)
    assert find_bundles(tmp_path, 1) and not find_bundles(tmp_path, 2) and not find_bundles(tmp_path, 3)
    assert len(list((tmp_path / BAD / "previous").iterdir())) == 2
    save_bundle(tmp_path / BAD, bundle("critic", step=3))
    set_aside(tmp_path, 0)
    assert len(list((tmp_path / BAD / "previous").iterdir())) == 4 and not find_bundles(tmp_path, 3)


def test_a_record_that_cannot_be_written_is_said_and_no_more(tmp_path: Path, capsys):
    (tmp_path / "file").touch()
    assert save_bundle(tmp_path / "file", bundle()) is None
    assert "step 3: the actor's batch was not kept in" in capsys.readouterr().err


@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: b"", lambda data: b"\xff" * len(data)])
def test_a_damaged_file_is_named(tmp_path: Path, spoil):
    path = save_bundle(tmp_path, bundle())
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(UserError, match=r"step_3_actor\.safetensors is no batch that a run has kept, or is damaged"):
        load_bundle(path)


def test_another_safetensors_file_is_named(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors is no batch"):
        load_bundle(tmp_path / "model.safetensors")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_only_valid_tokens_must_be_finite(value: float):
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, other = torch.zeros(2, 3), torch.full((2, 5), value)
    batch = DataProto.from_dict({"advantages": advantages, "response_mask": mask, "temperature": other})
    advantages[1, 1] = value
    assert not_finite(batch) == []
    advantages[1, 0] = value
    assert not_finite(batch) == ["advantages has 1 values that are not finite, the first in row 1, token 0"]
    assert not_finite(DataProto.from_dict({"chosen": other})) == []
