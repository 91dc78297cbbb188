"""What a checkpoint must not hold: a run that went on from it could only go on being wrong."""

from collections.abc import Iterable

import torch


class NotFiniteError(OSError):
    """A tensor that is to be saved holds NaN or infinity. An `OSError`, as what else keeps a checkpoint unwritten."""


def require_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Looks at every number of the floating-point tensors, without memory of their size.

    Raises:
        NotFiniteError: names the first tensor with NaN or infinity.
    """
    for name, tensor in named:
        # A sum shows both, and costs one reading; one that is too large for the type is not what is looked for.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not (finite := tensor.isfinite()).all():
            count = int(finite.numel() - finite.sum())
            raise NotFiniteError(f"{count} of the {finite.numel()} numbers of {name} are not finite")
