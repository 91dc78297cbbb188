"""Updates that would have spoiled the weights: none is made, the batch is kept, and too many in a row end the run."""

import sys
from pathlib import Path

from podium.protocol import DataProto
from podium.trainer.ppo.bundles import BAD, Bundle, not_finite, save_bundle
from podium.utils.errors import UserError

SKIPPED = "skipped"
"""Metric of an optimizer step that was not made because its loss or gradient was not finite; the roles report it."""
EMPTY = "empty"
"""Metric of a mini-batch without a valid token, which makes no step."""


class BadSteps:
    """Counts optimizer steps that were not made, and keeps the batches they were to be made on.

    Args:
        run_dir: the batches go to ``bad_steps/step_N_ROLE.safetensors`` in it.
        most_in_a_row: the step after so many ends the run; a good one between two starts the count anew.
    """

    def __init__(self, run_dir: Path, most_in_a_row: int):
        self._folder, self._most = run_dir / BAD, most_in_a_row
        self.in_a_row: dict[str, int] = {}

    def note(self, role: str, step: int, batch: DataProto, updates: list[dict[str, float]]) -> dict[str, float]:
        """Takes note of one call's optimizer steps; says and keeps the bad ones.

        Args:
            batch: what the role was given.
            updates: the metrics of each optimizer step.

        Returns:
            ``ROLE/skipped_steps`` and ``ROLE/empty_steps``.

        Raises:
            UserError: too many in a row.
        """
        bad = [SKIPPED in update for update in updates]
        for is_bad in bad:
            self.in_a_row[role] = self.in_a_row.get(role, 0) + 1 if is_bad else 0
        if any(bad):
            kept = save_bundle(self._folder, Bundle(step, role, batch, [i for i, is_bad in enumerate(bad) if is_bad]))
            print(
                f"step {step}: {sum(bad)} of {len(bad)} updates of the {role} had a loss, gradient or log-prob that is "
                f"not finite, and were not made{''.join(f'; {what}' for what in not_finite(batch))}"
                + (f"; the batch is in {kept}" if kept else ""),
                file=sys.stderr,
                flush=True,
            )
        if self.in_a_row.get(role, 0) >= self._most:
            raise UserError(
                f"step {step}: {self.in_a_row[role]} updates of the {role} in a row were not finite "
                f"(trainer.max_bad_steps={self._most}); the batches are in {self._folder}: look at the learning rate, "
                "the precision, or the weights that the run started from"
            )
        empty = sum(EMPTY in update for update in updates)
        return {f"{role}/skipped_steps": float(sum(bad)), f"{role}/empty_steps": float(empty)}
