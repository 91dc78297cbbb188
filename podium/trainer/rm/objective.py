"""What reward-model training minimises."""

import torch
from torch.nn.functional import logsigmoid

from podium.utils.torch_functional import Denominator, take_last_token

Tensors = dict[str, torch.Tensor]


def preference_objective(outputs: Tensors, batch: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
    """Bradley-Terry: ``-log sigmoid(score of chosen - score of rejected - margin)``, averaged over the pairs.

    The loss is InstructGPT's (arXiv 2203.02155), the margin Llama 2's (arXiv 2307.09288).

    Args:
        outputs: ``scores`` (2 b, R); rows alternate chosen, rejected.
        batch: ``response_mask`` (2 b, R), ``margins`` (2 b,).
        denominator: its sequences are twice the pairs of the mini-batch.
    """
    scores = take_last_token(outputs["scores"], batch["response_mask"])
    chosen, rejected = scores[0::2], scores[1::2]
    gap, pairs = chosen - rejected, max(denominator.sequences / 2, 1.0)
    loss = -logsigmoid(gap - batch["margins"][0::2]).sum() / pairs
    with torch.no_grad():
        metrics = {
            "train/loss": loss.detach(),
            "train/accuracy": (gap > 0).float().sum() / pairs,
            "train/score_chosen": chosen.sum() / pairs,
            "train/score_rejected": rejected.sum() / pairs,
        }
    return loss, metrics
