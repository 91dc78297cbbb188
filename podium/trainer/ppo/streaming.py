"""Generation that gives each response when it has finished, not when all have."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from podium.protocol import DataProto

_PARTS, _FEWEST_STEPS = 8, 16


def steps_at_once(max_response_length: int) -> int | None:
    """Tokens between two looks at what has finished; None where responses are too short for it to pay."""
    steps = max(_FEWEST_STEPS, -(-max_response_length // _PARTS))
    return steps if steps < max_response_length else None


def stream(
    rollout: Any,
    prompts: DataProto,
    sampling: Mapping[str, Any],
    seeds: torch.Tensor,
    min_version: int,
    steps: int,
    finished: Callable[[list[int], DataProto], None],
) -> DataProto:
    """As `podium.trainer.ppo.source.generate`, the same responses; `finished` is given each part of them at once.

    Args:
        rollout: has ``begin_sequences`` and ``finished_sequences``. One that was started anew in between has nothing
            left of the batch, and is given again what is missing.
        steps: as of `steps_at_once`.
        finished: called with row numbers and those rows of the batch.
    """
    request = prompts.select(batch_keys=["prompts", "prompt_mask"], non_tensor_batch_keys=[])
    request = request.union(DataProto.from_dict({"seeds": seeds, "rows": torch.arange(len(prompts))}))
    request.meta_info.update(sampling=dict(sampling), min_version=min_version)
    parts: list[DataProto] = []
    missing = set(range(len(prompts)))
    while missing:
        rollout.begin_sequences(request.select_idxs(sorted(missing)))
        left = True
        while left:
            answers = rollout.finished_sequences(steps)
            left = any(unfinished for _, unfinished in answers)
            for part in (part for part, _ in answers if part is not None):
                rows = part.batch["rows"].tolist()
                missing -= set(rows)
                parts.append(part)
                finished(rows, prompts.select_idxs(rows).union(part.select(batch_keys=_without_rows(part))))
    batch = DataProto.concat(parts)
    assert batch.batch is not None
    batch = batch.select_idxs(batch.batch["rows"].argsort())
    return prompts.select().union(batch.select(batch_keys=_without_rows(batch)))


def _without_rows(part: DataProto) -> list[str]:
    assert part.batch is not None
    return [str(name) for name in part.batch.keys() if name != "rows"]  # noqa: SIM118 - a TensorDict has no items of its own
