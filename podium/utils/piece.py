"""What a rank holds of a whole tensor: the coordinate in which every parallel layout is written down."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, as it lies in a rank's own memory.

    Whole tensors are those of the Hugging Face checkpoint, under its names. A layout (Megatron's tp and pp, FSDP's
    rows, an inference engine's fused and sharded parameters) is for each rank the list of its pieces, so any two of
    them can be compared: what has to travel is where the boxes of one meet the boxes of the other.
    """

    name: str
    """Of the whole tensor."""
    starts: tuple[int, ...]
    """First index of the box, a dimension each."""
    stops: tuple[int, ...]
    """One past its last index."""
    tensor: torch.Tensor
    """A view of the rank's memory, of shape ``stops - starts``: writing to it changes the model."""

    def __post_init__(self) -> None:
        shape = tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))
        assert shape == tuple(self.tensor.shape), f"{self.name}: box {shape}, tensor {tuple(self.tensor.shape)}"
