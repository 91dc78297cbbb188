"""The advantage estimator that the configuration names, and what it reads."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from podium.trainer.ppo.advantages import get_adv_estimator_fn
from podium.utils.errors import UserError

INPUTS = (
    "token_level_rewards",
    "response_mask",
    "index",
    "old_log_probs",
    "rollout_log_probs",
    "values",
    "reward_baselines",
    "sum_pi_squared",
    "rollout_is_weights",
    "non_tensor_batch",
    "gamma",
    "lam",
    "norm_adv_by_std_in_grpo",
    "config",
)
"""Arguments that an estimator may name. Those that cost something (a critic, a greedy response) are made if it does."""


@dataclass(frozen=True)
class Estimator:
    """An estimator of ``algorithm.adv_estimator``, called with the arguments that it names."""

    name: str
    function: Callable[..., tuple[Tensor, Tensor]]
    reads: frozenset[str]
    """The arguments it names."""

    @classmethod
    def named(cls, name: str) -> "Estimator":
        """Looks it up.

        Raises:
            UserError: there is none of that name (the nearest is named), or it needs what is not in `INPUTS`.
        """
        function = get_adv_estimator_fn(name)
        named = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        missing = [p.name for p in named if p.default is p.empty and p.name not in INPUTS]
        if missing:
            raise UserError(
                f"algorithm.adv_estimator={name} needs the argument(s) {', '.join(missing)}, which the trainer does "
                f"not have; it has {', '.join(INPUTS)}"
            )
        return cls(name, function, frozenset(p.name for p in named))

    def __call__(self, available: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Advantages and returns, (B, R), from those of `available` that the estimator names."""
        return self.function(**{name: value for name, value in available.items() if name in self.reads})
