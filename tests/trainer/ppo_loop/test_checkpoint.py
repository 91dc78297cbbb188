"""Checkpoints on disk: what a crash leaves, and that they hold what was trained."""

import json
from pathlib import Path

import pytest
import torch

from podium.trainer.ppo.checkpoint import LATEST, write_checkpoint
from podium.trainer.ppo.source import generate, prompt_batch, response_seeds
from podium.trainer.ppo.trainer import forward_inputs


class Role:
    """Writes one file; fails when told to."""

    def __init__(self, text: str, fails: bool = False):
        self.text, self.fails = text, fails

    def save_checkpoint(self, path: str) -> None:
        Path(path).mkdir()
        (Path(path) / "weights").write_text(self.text)
        if self.fails:
            raise OSError("disk full")


def read(run_dir):
    step = (run_dir / LATEST).read_text().strip()
    return step, (run_dir / f"global_step_{step}" / "actor" / "weights").read_text()


def test_a_checkpoint_is_whole_or_not_there(tmp_path):
    path = write_checkpoint(tmp_path, 3, {"actor": Role("three"), "critic": Role("c")}, {"step": 3})
    assert path == tmp_path / "global_step_3" and read(tmp_path) == ("3", "three")
    assert json.loads((path / "trainer.json").read_text()) == {"step": 3}
    assert (path / "critic" / "weights").read_text() == "c"

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, 4, {"actor": Role("four", fails=True)}, {"step": 4})
    assert read(tmp_path) == ("3", "three") and not (tmp_path / "global_step_4").exists()

    # The remains of the failure do not get into the next try.
    write_checkpoint(tmp_path, 4, {"critic": Role("four")}, {"step": 4})
    assert not (tmp_path / "global_step_4" / "actor").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_3", "global_step_4", LATEST]


def test_the_same_step_again_replaces_it(tmp_path):
    write_checkpoint(tmp_path, 1, {"actor": Role("old")}, {})
    write_checkpoint(tmp_path, 1, {"actor": Role("new")}, {})
    assert read(tmp_path) == ("1", "new")


def test_a_relative_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert write_checkpoint(Path("runs/a"), 1, {"actor": Role("x")}, {}).is_absolute()
    assert read(tmp_path / "runs" / "a") == ("1", "x")


def test_trained_roles_come_back_as_they_were(parts, tmp_path):
    groups = parts.groups
    prompts = prompt_batch([parts.train[i] for i in range(16)], parts.tokenizer.pad_token_id, 7, 1)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    batch = generate(groups["rollout"], prompts, sampling, response_seeds(0, 0, 16), 0)

    def look() -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = groups["actor"].compute_log_prob(forward_inputs(batch)).batch["old_log_probs"]
        return log_probs, groups["critic"].compute_values(forward_inputs(batch)).batch["values"]

    def train() -> list[dict[str, float]]:
        data = forward_inputs(batch)
        log_probs, values = look()
        for name, tensor in {
            "old_log_probs": log_probs,
            "ref_log_prob": log_probs - 0.1,
            "advantages": torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs),
            "values": values,
            "returns": values + 1,
        }.items():
            data.batch[name] = tensor
        return groups["actor"].update_actor(data)[0] + groups["critic"].update_critic(data)[0]

    train()
    trained = {name: groups[name] for name in ("actor", "critic")}
    path = write_checkpoint(tmp_path, 1, trained, {})
    before, ahead = look(), train()
    after = look()
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    for name, group in trained.items():
        group.load_checkpoint(str(path / name))
    assert all(map(torch.equal, look(), before))
    # Optimizer and schedule are back too: the same step again ends at the same place.
    assert train() == ahead and all(map(torch.equal, look(), after))
