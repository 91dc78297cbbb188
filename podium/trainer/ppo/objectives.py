"""What actor and critic minimise: the losses put together by the configuration, in the form that engines take."""

from dataclasses import dataclass
from typing import Any

import torch

from podium.trainer.ppo.kl import compute_kl_loss
from podium.trainer.ppo.losses import PolicyLossFn, compute_entropy_loss, compute_value_loss, get_policy_loss_fn
from podium.utils.torch_functional import Denominator

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss, minus the entropy bonus, plus the KL to the reference.

    It is pickled to the workers with the loss function itself, so a loss that a user registered in the driver's
    process needs no registration in theirs.
    """

    config: Any
    """The actor's configuration."""
    loss_fn: PolicyLossFn

    @classmethod
    def from_config(cls, config: Any) -> "PolicyObjective":
        """Looks the loss up by name."""
        return cls(config, get_policy_loss_fn(config.policy_loss.loss_mode))

    def __call__(self, outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
        config, mask = self.config, batch["response_mask"]
        loss, metrics = self.loss_fn(
            old_log_prob=batch["old_log_probs"],
            log_prob=outputs["log_probs"],
            advantages=batch["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            denominator=denominator,
        )
        metrics["actor/pg_loss"] = loss.detach()
        entropy, entropy_metrics = compute_entropy_loss(outputs["entropy"], mask, config.loss_agg_mode, denominator)
        metrics.update(entropy_metrics)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl, kl_metrics = compute_kl_loss(
                outputs["log_probs"],
                batch["ref_log_prob"],
                mask,
                config.kl_loss_type,
                config.loss_agg_mode,
                denominator,
            )
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
