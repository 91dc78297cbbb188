"""Batches that come in parts."""

import pytest
import torch

from podium.trainer.ppo.source import generate, prompt_batch, response_seeds
from podium.trainer.ppo.streaming import steps_at_once, stream

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


class Forgetful:
    """A rollout that is started anew in the middle of a batch."""

    def __init__(self, group):
        self._group, self.begun, self._calls = group, [], 0

    def begin_sequences(self, request):
        self.begun.append(request.batch["rows"].tolist())
        self._group.begin_sequences(request)

    def finished_sequences(self, steps):
        self._calls += 1
        return [(None, 0)] if self._calls == 5 else self._group.finished_sequences(steps)


def test_what_a_new_process_has_lost_is_asked_for_again(parts):
    prompts = prompt_batch([parts.train[i] for i in range(8)], parts.tokenizer.pad_token_id, 7, n=2)
    seeds = response_seeds(1, 2, len(prompts))
    whole = generate(parts.groups["rollout"], prompts, SAMPLING, seeds, 0)
    rollout, seen = Forgetful(parts.groups["rollout"]), []

    def finished(rows, part):
        seen.extend(rows)
        assert torch.equal(part.batch["responses"], whole.batch["responses"][rows])
        assert part.non_tensor_batch["uid"].tolist() == whole.non_tensor_batch["uid"][rows].tolist()

    batch = stream(rollout, prompts, SAMPLING, seeds, 0, 1, finished)
    first, second = rollout.begun
    assert first == sorted(seen) == list(range(16)) and 0 < len(second) < 16
    assert set(batch.batch.keys()) == set(whole.batch.keys()) and batch.meta_info == whole.meta_info
    for name, column in whole.batch.items():
        assert torch.equal(batch.batch[name], column), name


@pytest.mark.parametrize(("longest", "steps"), [(7, None), (16, None), (17, 16), (128, 16), (1024, 128)])
def test_short_responses_come_at_once(longest, steps):
    assert steps_at_once(longest) == steps
