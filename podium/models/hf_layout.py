"""The parameters of a transformers module as boxes of the tensors in its checkpoint."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from podium.utils.errors import UserError
from podium.utils.piece import Piece

NamedShard = tuple[str, tuple[int, ...], torch.Tensor]
"""A parameter's name in the module, where this rank's part of it starts (an index each dimension), and that part."""


def checkpoint_pieces(model_type: str, shards: Iterable[NamedShard]) -> list[Piece]:
    """What the rows of parameters are in the checkpoint.

    transformers keeps the experts of a layer in one tensor, gate and up stacked; checkpoints have a tensor for each.

    Args:
        model_type: of the model's config.

    Raises:
        UserError: the model keeps a parameter in a way that is no box of what its checkpoint has.
    """
    rules = get_checkpoint_conversion_mapping(model_type) or []
    return [piece for shard in shards for piece in _pieces(model_type, rules, *shard)]


def checkpoint_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a whole model under the names of its checkpoint."""
    parameters = [(name, (0,) * parameter.dim(), parameter.detach()) for name, parameter in model.named_parameters()]
    return ((piece.name, piece.tensor) for piece in checkpoint_pieces(model.config.model_type, parameters))


def _pieces(
    model_type: str, rules: list[Any], name: str, starts: tuple[int, ...], data: torch.Tensor
) -> Iterator[Piece]:
    for rule in rules:
        if isinstance(rule, WeightConverter) and any(name.endswith(pattern) for pattern in rule.target_patterns):
            _check(model_type, name, rule)
            prefix = name.removesuffix(rule.target_patterns[0])
            yield from _experts([_renamed(rules, prefix + pattern) for pattern in rule.source_patterns], starts, data)
            return
    yield _piece(_renamed(rules, name), starts, data)


def _check(model_type: str, name: str, rule: WeightConverter) -> None:
    merge, *rest = rule.operations
    stacks = len(rule.source_patterns)
    is_merge = isinstance(merge, MergeModulelist) and merge.dim == 0 and len(rule.target_patterns) == 1
    is_stack = not rest if stacks == 1 else len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1
    if not (is_merge and is_stack):
        raise UserError(
            f"{model_type} keeps {name} as {[type(operation).__name__ for operation in rule.operations]} of "
            f"{rule.source_patterns}, which weight sync cannot take apart"
        )


def _experts(patterns: list[str], starts: tuple[int, ...], data: torch.Tensor) -> Iterator[Piece]:
    """Parts of (experts, stacked rows, columns); the rows and columns are all here."""
    assert not any(starts[1:]), "experts are sharded by expert"
    for index, expert in enumerate(data):
        for pattern, part in zip(patterns, expert.chunk(len(patterns)), strict=True):
            yield _piece(pattern.replace("*", str(starts[0] + index)), (0, 0), part)


def _piece(name: str, starts: tuple[int, ...], data: torch.Tensor) -> Piece:
    return Piece(name, starts, tuple(start + size for start, size in zip(starts, data.shape, strict=True)), data)


def _renamed(rules: list[Any], name: str) -> str:
    """The module's name as the checkpoint has it."""
    for rule in rules:
        if isinstance(rule, WeightRenaming):
            for mine, theirs in zip(rule.target_patterns, rule.source_patterns, strict=True):
                name = name.replace(mine, theirs)
    return name
