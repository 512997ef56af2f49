"""Hashes of a request's first rows, by which an anchor and its span workers check that they have
computed the same rows.

A row's key depends on its contents; the hash of a prefix depends on its keys and their order. All
arithmetic is modulo 2^64.
Legend: N rows, H hidden size.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Keys = NDArray[np.uint64]
_BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mixed(numbers: Keys) -> Keys:
    """Return a well distributed odd number for each number. Source: splitmix64 (Steele et al.,
    2014).
    """
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


class RowKeys:
    """Computes 64-bit keys of rows from the bits of their hidden states."""

    def __init__(self) -> None:
        self._weights_H = torch.empty(0, dtype=torch.int64)

    def of(self, rows_NH: Tensor) -> Keys:
        """Return a key for each row: uint64 [N]."""
        if len(self._weights_H) != rows_NH.shape[1]:
            weights = _mixed(np.arange(rows_NH.shape[1], dtype=np.uint64)).view(np.int64)
            self._weights_H = torch.from_numpy(weights).to(rows_NH.device)
        bits_NH = rows_NH.contiguous().view(_BITS_OF[rows_NH.element_size()]).long()
        return (bits_NH * self._weights_H).sum(1).cpu().numpy().view(np.uint64)


class PrefixHashes:
    """Hashes of all prefixes of one request's rows."""

    def __init__(self) -> None:
        self._hashes: Keys = np.zeros(1, np.uint64)
        self._length = 0

    @property
    def num_rows(self) -> int:
        return self._length

    def before(self, start: int) -> int | None:
        """Return the hash of the rows before position `start`; None if there are fewer."""
        return int(self._hashes[start]) if start <= self._length else None

    def extend(self, start: int, keys: Keys) -> None:
        """Set the keys of the rows from `start` on. Rows after the last given key are dropped."""
        assert start <= self._length, f"row {start} of {self._length}"
        stop = start + len(keys)
        if stop >= len(self._hashes):
            grown = np.zeros(max(2 * len(self._hashes), stop + 1), np.uint64)
            grown[: len(self._hashes)] = self._hashes
            self._hashes = grown
        terms = keys * _mixed(np.arange(start, stop, dtype=np.uint64))
        self._hashes[start + 1 : stop + 1] = self._hashes[start] + np.cumsum(terms, dtype=np.uint64)
        self._length = stop
