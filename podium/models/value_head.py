"""A transformer with one scalar a token: the critic and the reward model."""

import copy
from typing import Any

import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModel, AutoModelForSequenceClassification

from podium.models.hf import load_pretrained
from podium.utils.errors import UserError


class ValueModel(torch.nn.Module):
    """Backbone of a causal language model under a linear head that starts at zero.

    The attributes are those of `AutoModelForSequenceClassification` (``model`` or whatever the architecture calls its
    backbone, and ``score``), so that a saved value model with one label loads there too.
    """

    def __init__(self, backbone: Any):
        super().__init__()
        self.config = value_config(backbone.config.get_text_config())
        self._backbone_name = getattr(_classifier(self.config), "base_model_prefix", "model")
        setattr(self, self._backbone_name, backbone)
        self._no_split_modules = backbone._no_split_modules
        self.score = torch.nn.Linear(self.config.hidden_size, 1, bias=False, dtype=next(backbone.parameters()).dtype)
        # Zero: before its first update the critic knows nothing, and says so, instead of adding noise to advantages.
        torch.nn.init.zeros_(self.score.weight)

    @property
    def backbone(self) -> Any:
        """The transformers model under the head."""
        return getattr(self, self._backbone_name)

    @property
    def hf_architecture(self) -> str:
        """The Hugging Face class that loads this model once it is saved."""
        return value_architecture(self.config)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Values (b, L, 1)."""
        hidden = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return self.score(hidden)


def value_config(config: Any) -> Any:
    """The config of a value model on a backbone with `config`."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    return config


def value_architecture(config: Any) -> str:
    """The Hugging Face class that loads a value model of this config."""
    return getattr(_classifier(config), "__name__", "ValueModel")


def _classifier(config: Any) -> Any:
    """The architecture's class for sequence classification, or None."""
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return known.get(type(config), None)


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


def load_reward_model(
    path: str, dtype: torch.dtype, *, gradient_checkpointing: bool, trust_remote_code: bool
) -> ValueModel:
    """A trained reward model at `path`, on the CPU: what `AutoModelForSequenceClassification` loads with one label.

    Raises:
        UserError: it has more labels than one, or no trained head.
    """
    classifier: Any = load_pretrained(
        AutoModelForSequenceClassification,
        path,
        dtype,
        gradient_checkpointing=gradient_checkpointing,
        trust_remote_code=trust_remote_code,
    )
    head = getattr(classifier, "score", None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1 or head.bias is not None:
        raise UserError(
            f"{path}: {type(classifier).__name__} has no linear score of one number; give a reward model with one label"
        )
    model = ValueModel(getattr(classifier, classifier.base_model_prefix))
    model.score = head
    return model
