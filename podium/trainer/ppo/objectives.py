"""What actor and critic minimise: the losses put together by the configuration, in the form that engines take."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from podium.trainer.plugins import load_plugins
from podium.trainer.ppo.kl import compute_kl_loss
from podium.trainer.ppo.losses import PolicyLossFn, compute_entropy_loss, compute_value_loss, get_policy_loss_fn
from podium.utils.errors import UserError
from podium.utils.torch_functional import Denominator

Tensors = dict[str, torch.Tensor]

LOSS_ARGUMENTS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
    "denominator",
)
"""Keywords that every policy loss is called with."""


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss, minus the entropy bonus, plus the KL to the reference.

    It is pickled to the workers with the loss function itself, so a loss that a user registered in the driver's
    process needs no registration in theirs; where there are plug-ins, the workers load them and look the loss up.
    """

    config: Any
    """The actor's configuration."""
    loss_fn: PolicyLossFn
    plugins: tuple[str, ...] = ()
    """What must be loaded before `loss_fn` can be looked up, as `load_plugins` returns it."""

    @classmethod
    def from_config(cls, config: Any, plugins: Sequence[str] = ()) -> "PolicyObjective":
        """Loads the plug-ins and looks the loss up by name.

        Raises:
            UserError: there is none of that name, or it cannot be called as `__call__` does.
        """
        plugins = load_plugins(plugins)
        name = config.policy_loss.loss_mode
        loss_fn = get_policy_loss_fn(name)
        try:
            inspect.signature(loss_fn).bind(**dict.fromkeys(LOSS_ARGUMENTS))
        except TypeError as error:
            raise UserError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={name}: {loss_fn.__qualname__} cannot be called with "
                f"the keywords {', '.join(LOSS_ARGUMENTS)}: {error}"
            ) from None
        return cls(config, loss_fn, plugins)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.plugins:
            return PolicyObjective.from_config, (self.config, self.plugins)
        return PolicyObjective, (self.config, self.loss_fn)

    def __call__(self, outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
        config, mask = self.config, batch["response_mask"]
        mode, horizon = config.loss_agg_mode, config.loss_scale_factor
        loss, metrics = self.loss_fn(
            old_log_prob=batch["old_log_probs"],
            log_prob=outputs["log_probs"],
            advantages=batch["advantages"],
            response_mask=mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=batch.get("rollout_is_weights"),
            denominator=denominator,
        )
        metrics["actor/pg_loss"] = loss.detach()
        entropy, entropy_metrics = compute_entropy_loss(outputs["entropy"], mask, mode, denominator, horizon)
        metrics.update(entropy_metrics)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            log_prob, kind = outputs["log_probs"], config.kl_loss_type
            kl, kl_metrics = compute_kl_loss(log_prob, batch["ref_log_prob"], mask, kind, mode, denominator, horizon)
            loss = loss + config.kl_loss_coef * kl
            metrics.update(kl_metrics)
        return loss, metrics


@dataclass(frozen=True)
class ValueObjective:
    """The clipped value loss."""

    config: Any
    """The critic's configuration."""

    def __call__(self, outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
        loss, metrics = compute_value_loss(
            outputs["values"],
            batch["returns"],
            batch["values"],
            batch["response_mask"],
            self.config.cliprange_value,
            self.config.loss_agg_mode,
            denominator,
        )
        return loss, {**metrics, "critic/vf_loss": loss.detach()}
