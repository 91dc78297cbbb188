"""A transformer with one scalar a token: the critic."""

import copy
from typing import Any

import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModel

from podium.models.hf import load_pretrained
from podium.utils.errors import UserError


class ValueModel(torch.nn.Module):
    """Backbone of a causal language model under a linear head that starts at zero.

    The attributes are those of `AutoModelForSequenceClassification` (``model``, ``score``), so that a saved value
    model with one label loads there too.
    """

    def __init__(self, backbone: Any):
        super().__init__()
        self.config = copy.deepcopy(backbone.config.get_text_config())
        self.config.num_labels = 1
        self.model = backbone
        self._no_split_modules = backbone._no_split_modules
        self.score = torch.nn.Linear(self.config.hidden_size, 1, bias=False, dtype=next(backbone.parameters()).dtype)
        # Zero: before its first update the critic knows nothing, and says so, instead of adding noise to advantages.
        torch.nn.init.zeros_(self.score.weight)

    @property
    def hf_architecture(self) -> str:
        """The Hugging Face class that loads this model once it is saved."""
        kind: Any = type(self.config)
        known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        return known[kind].__name__ if kind in known else "ValueModel"

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Values (b, L, 1)."""
        hidden = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return self.score(hidden)


def load_value_model(
    path: str, dtype: torch.dtype, *, gradient_checkpointing: bool, trust_remote_code: bool
) -> ValueModel:
    """A critic on the backbone at `path`, on the CPU.

    Raises:
        UserError: the backbone's architecture gives no hidden states of its own.
    """
    backbone: Any = load_pretrained(
        AutoModel, path, dtype, gradient_checkpointing=gradient_checkpointing, trust_remote_code=trust_remote_code
    )
    if not hasattr(backbone.config.get_text_config(), "hidden_size"):
        raise UserError(f"{path}: {type(backbone).__name__} has no hidden_size, so no value head can be put on it")
    return ValueModel(backbone)
