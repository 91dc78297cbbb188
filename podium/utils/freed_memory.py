"""Memory that is given back for a while, under tensors that stay."""

from collections.abc import Iterable

import torch


class FreedMemory:
    """Frees the storages of tensors at once; `restore` allocates them again, filled with zeros.

    Tensors, their views and whoever refers to them stay valid, only nothing may read or write them in between.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        self.nbytes = sum(size for _, size in self._sizes)
        """Bytes that were freed."""
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocates all of it."""
        for storage, size in self._sizes:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._sizes = []
