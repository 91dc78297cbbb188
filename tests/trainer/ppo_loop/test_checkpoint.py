"""That a checkpoint holds what was trained."""

import torch

from podium.trainer.checkpoint import Checkpoints
from podium.trainer.config.shared import CheckpointConfig
from podium.trainer.ppo.source import generate, prompt_batch, response_seeds
from podium.trainer.ppo.trainer import forward_inputs

SETTINGS = CheckpointConfig()


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
    with Checkpoints(tmp_path, SETTINGS, trained, {}) as checkpoints:
        checkpoints.begin(1, {})
        checkpoints.commit({})
    before, ahead = look(), train()
    after = look()
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    for name, group in trained.items():
        group.load_checkpoint(str(tmp_path / "global_step_1" / name))
    assert all(map(torch.equal, look(), before))
    # Optimizer and schedule are back too: the same step again ends at the same place.
    assert train() == ahead and all(map(torch.equal, look(), after))
