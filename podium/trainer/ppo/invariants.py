"""What must hold in every step, whatever the algorithm: each a metric, and a rule that warns or stops the run."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from podium.protocol import DataProto
from podium.trainer.config.ppo import PPOConfig
from podium.utils.errors import UserError


@dataclass(frozen=True)
class _Rule:
    limit: float
    meaning: str
    """Of a metric above the limit."""


class Invariants:
    """Checks a step's batch and metrics.

    A ratio or a log-prob gap of numerics alone is small in float32, larger in bfloat16; the limits are far above both.

    Args:
        mini_rows: responses in one update of the actor.
    """

    def __init__(self, config: PPOConfig, mini_rows: int):
        actor, rollout, algorithm = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm
        compute = actor.fsdp_config.dtype if actor.strategy == "fsdp" else actor.megatron.dtype
        rough = "bfloat16" in (compute, rollout.dtype)
        self._group, self._stops = rollout.n, config.trainer.invariants == "stop"
        self._mini_rows = mini_rows
        failures = _Rule(
            config.reward_model.max_failure_rate / 2, "responses without a score; twice as many end the run"
        )
        self._rules = {
            "invariants/incomplete_groups": _Rule(0, "prompts that do not have actor_rollout_ref.rollout.n responses"),
            "invariants/tokens_after_end": _Rule(0, "responses that go on after their end-of-sequence token"),
            "invariants/other_weight_versions": _Rule(0, "responses of other weights than those that were synced last"),
            "invariants/advantage_mean_max": _Rule(
                6,
                "a mini-batch whose mean advantage is so many standard errors from the batch's is no sample of it",
            ),
            "reward/failure_rate": failures,
            "reward_model/failure_rate": failures,
        }
        if not algorithm.rollout_correction.bypass_mode:  # there the old log-probs are the rollout's
            self._rules["training/first_ratio_dev_max"] = _Rule(
                0.5 if rough else 0.01, "the policy that is updated is not the one that gave the old log-probs"
            )
        self._gap = _Rule(0.2 if rough else 0.02, "rollout and trainer disagree about the same weights")
        self._said: set[str] = set()

    def __call__(self, step: int, batch: DataProto, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics that are counted here, and ``invariants/violated``, the number of rules.

        Args:
            metrics: of the step; ``training/weight_version`` is the first with the weights that the rollout had last.

        Raises:
            UserError: one is violated, with ``trainer.invariants=stop``.
        """
        counted = {
            "invariants/incomplete_groups": float(incomplete_groups(batch, self._group)),
            "invariants/tokens_after_end": float(tokens_after_end(batch)),
            "invariants/other_weight_versions": float(other_versions(batch, metrics["training/weight_version"])),
            "invariants/advantage_mean_max": advantage_mean(batch, self._mini_rows),
        }
        rules = dict(self._rules)
        if not metrics.get("training/weight_age"):  # older weights on purpose
            rules["training/rollout_log_probs_diff_mean"] = self._gap
        known = {**metrics, **counted}
        # A NaN is no number within a limit.
        violated = {name: rule for name, rule in rules.items() if name in known and not known[name] <= rule.limit}
        for name, rule in violated.items():
            text = f"step {step}: {name} is {known[name]:.4g}, the limit is {rule.limit:g}: {rule.meaning}"
            if self._stops:
                raise UserError(f"{text} (trainer.invariants=stop)")
            if name not in self._said:
                print(f"warning: {text}; it is said once", file=sys.stderr, flush=True)
            self._said.add(name)
        return {**counted, "invariants/violated": float(len(violated))}


def incomplete_groups(batch: DataProto, size: int) -> int:
    """Prompts with more or fewer than `size` responses."""
    return sum(count != size for count in Counter(batch.non_tensor_batch["uid"]).values())


def tokens_after_end(batch: DataProto) -> int:
    """Responses in which a token of the policy follows directly on one that ends a response."""
    assert batch.batch is not None
    ends = batch.meta_info.get("eos_token_id", [])
    mask = batch.batch["response_mask"].bool()
    ended = torch.isin(batch.batch["responses"], torch.tensor(ends if isinstance(ends, list) else [ends])) & mask
    return int((ended[:, :-1] & mask[:, 1:]).any(dim=-1).sum())


def other_versions(batch: DataProto, expected: float) -> int:
    """Responses with a token of other weights, whichever engine it is from: of an older version."""
    assert batch.batch is not None
    return int((batch.batch["weight_versions"] < expected).any(dim=-1).sum())


def advantage_mean(batch: DataProto, mini_rows: int) -> float:
    """How far the mean advantage of a mini-batch is from the batch's, in standard errors: the largest.

    Of the means over each response's tokens, which are alike as a response's tokens are not: a mini-batch that is drawn
    without regard to the outcome is within a few. Responses without a valid token count for nothing.
    """
    assert batch.batch is not None
    mask = batch.batch["response_mask"].bool()
    sums = torch.where(mask, batch.batch["advantages"].double(), 0.0).sum(dim=-1)
    means = sums / mask.sum(dim=-1).clamp(min=1)
    deviations = (means - means.mean()).split(mini_rows)
    spread = means.std(correction=0)
    if spread == 0:
        return 0.0
    return max(float(part.mean().abs() / spread * len(part) ** 0.5) for part in deviations)
