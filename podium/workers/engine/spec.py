"""What a role asks of its engine, in words that every engine understands."""

from dataclasses import dataclass
from typing import Any

from podium.models.lora import LoRA


@dataclass(frozen=True)
class LogProbs:
    """The outputs of a language model: ``log_probs`` and ``entropy``, at the sampling temperature."""

    temperature: float = 1.0
    entropy_grad: bool = False
    """The loss differentiates the entropy."""
    sum_pi_squared: bool = False
    """Without gradients, give the sum of squared probabilities too."""


@dataclass(frozen=True)
class Values:
    """The output of a value model, a backbone with one scalar a token: ``values``."""


@dataclass(frozen=True)
class Scores:
    """The output of a reward model, the same kind of model: ``scores``, of the sequence that ends with each token."""

    has_head: bool = True
    """Whether the directory has the score head; without, it is a backbone, and the head starts at zero."""
    pad_token_id: int | None = None
    """Goes into the exported config: transformers finds the last token of a padded sequence by it."""


Outputs = LogProbs | Values | Scores


@dataclass(frozen=True)
class ModelSpec:
    """The model to lay out."""

    path: str
    """Hugging Face directory, or cached hub name; of the backbone for `Values`."""
    outputs: Outputs
    trust_remote_code: bool = False
    recompute: bool = False
    """Recompute activations in backward."""
    lora: LoRA | None = None
    """Train adapters on a frozen model."""

    @classmethod
    def trained(cls, model: Any, outputs: Outputs, seed: int, path: str | None = None) -> "ModelSpec":
        """From the section of a model that is trained.

        Args:
            model: has the fields of `ModelConfig`.
            seed: draws what does not come from the directory.
            path: in place of the section's.
        """
        lora = LoRA.from_config(model, seed)
        return cls(path or model.path, outputs, model.trust_remote_code, model.enable_gradient_checkpointing, lora)


@dataclass(frozen=True)
class Training:
    """How the model is trained; a model without is frozen."""

    optim: Any
    """Has the fields of `OptimConfig`."""
    total_steps: int
    """Optimizer steps of the whole run, for the schedule."""
    grad_clip: float
    """Largest global gradient norm."""
