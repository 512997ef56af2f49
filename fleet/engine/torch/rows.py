"""A request's input rows, kept for as long as it lives so that lost pages can be computed again."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Rows:
    """Grows at the end. Shapes: each row is [1, H]."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def extend(self, rows_NH: Tensor) -> None:
        self._rows += rows_NH.split(1)

    def cut(self, start: int, stop: int) -> Tensor:
        """[stop - start, H]."""
        return self._rows[start] if stop - start == 1 else torch.cat(self._rows[start:stop])


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
