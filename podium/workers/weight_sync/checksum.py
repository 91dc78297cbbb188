"""A checksum of a tensor's bits that knows where each element stands."""

import hashlib

import torch

_COLUMNS = 8192
_ROWS = 16  # a chunk of 1 MiB: the second sum finds it in the cache


def tensor_checksum(tensor: torch.Tensor) -> int:
    """64 bits that depend on every bit of the tensor and on its place, not on strides or device; 0 for no elements.

    The bits are read as a matrix of 8-byte words, `_COLUMNS` wide, and the sums of its rows and of its columns (modulo
    2**64) are hashed, with what is left below the last whole row. A changed word changes the sum of its row; two
    different words that change places change the sums of their rows or, within a row, those of their columns: what the
    sums miss needs at least four wrong words. It reads memory once, about as fast as a copy does.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    data = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element is contiguous whatever its stride
    if not data.numel():
        return 0
    whole = data.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
    digest = hashlib.blake2b(data[whole:].cpu().numpy().data, digest_size=8)
    if whole:
        words = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
        columns, rows = torch.zeros(_COLUMNS, dtype=torch.int64, device=data.device), []
        for part in words.view(torch.int64).view(-1, _COLUMNS).split(_ROWS):
            rows.append(part.sum(dim=1))
            columns += part.sum(dim=0)
        digest.update(torch.cat([columns, *rows]).cpu().numpy().data)
    return int.from_bytes(digest.digest(), "little")
