"""What supervised fine-tuning minimises."""

import torch

from podium.trainer.ppo.losses import agg_loss
from podium.utils.torch_functional import Denominator

Tensors = dict[str, torch.Tensor]


def sft_objective(outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
    """Negative log-likelihood of the response tokens, averaged over all of them in the batch."""
    loss = agg_loss(-outputs["log_probs"], batch["response_mask"], "token-mean", denominator)
    return loss, {"train/loss": loss.detach()}
