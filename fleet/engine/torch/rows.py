"""A request's input rows (embeddings, one per position), stored until the request ends so that
freed pages can be recomputed.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Rows:
    """Growing list of a request's input rows. Shapes: each row is [1, H]."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def extend(self, rows_NH: Tensor) -> None:
        self._rows += rows_NH.split(1)

    def append(self, row_1H: Tensor) -> None:
        self._rows.append(row_1H)

    def cut(self, start: int, stop: int) -> Tensor:
        """Return the rows of positions [start, stop): [stop - start, H]."""
        return self._rows[start] if stop - start == 1 else torch.cat(self._rows[start:stop])


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def side_by_side(parts: Mapping[int, Tensor | None]) -> Tensor | None:
    """Concatenate parts [N, H] along the columns, in the order of the mapping; None if there are no
    parts or a part is None.
    """
    found = [part for part in parts.values() if part is not None]
    return torch.cat(found, -1) if found and len(found) == len(parts) else None
