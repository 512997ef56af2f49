"""What is kept of a request that has ended, for its session's next one: the pages of its rows, and what the rows were.

Pages are moved and never shared, so a prefix serves one request at a time. Knows no scheduling and no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from fleet.engine.torch.kv_pool import KVPool, PageTable

_NO_ID = -(1 << 63)
"""Set in every key made of contents: ids of tokens are not negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A task's leading rows, told so that another request can find out how far it begins alike.

    Shapes: `keys` int64 [N], one a row from the first on; where keys are equal up to a row, the rows up to it are.
    `tapped` holds, by position, what was tapped of those rows whose tapped ones are passed on.
    """

    keys: NDArray[np.int64]
    tapped: Mapping[int, NDArray[np.float32]] = field(default_factory=dict[int, NDArray[np.float32]])


def content_key(content: bytes) -> int:
    """The key of a row that is known by what it holds, and not by the id of a token."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True) | _NO_ID


def content_keys(rows_NH: NDArray[np.float32]) -> NDArray[np.int64]:
    """Each row by its bytes: [N, H] -> int64 [N]."""
    return np.array([content_key(row.tobytes()) for row in np.ascontiguousarray(rows_NH)], np.int64)


def joined_keys(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


def num_equal_keys(keys: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    """How many first keys the two have in common."""
    length = min(len(keys), len(others))
    different = np.flatnonzero(keys[:length] != others[:length])
    return int(different[0]) if len(different) else length


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """A prefix and the pages that hold its rows. Invariant: one key a computed row."""

    prefix: Prefix
    table: PageTable


class PrefixCache:
    """By session, the longest unused first."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._kept: dict[str, CachedPrefix] = {}

    @property
    def num_pages(self) -> int:
        return sum(len(kept.table.pages) for kept in self._kept.values())

    def num_rows(self, session: str) -> int:
        kept = self._kept.get(session)
        return len(kept.prefix.keys) if kept is not None else 0

    def keep(self, session: str, prefix: Prefix, table: PageTable, num_computed: int) -> None:
        """Take a request's table over; of two requests of a session, the one that ended last is what the next one follows."""
        self.give_up(session)
        num_rows = min(len(prefix.keys), num_computed)
        if num_rows == 0:
            self._pool.give_back(table)
            return
        self._pool.shrink(table, num_rows)
        tapped = {position: row for position, row in prefix.tapped.items() if position < num_rows}
        self._kept[session] = CachedPrefix(prefix=Prefix(keys=prefix.keys[:num_rows], tapped=tapped), table=table)

    def take(self, session: str) -> CachedPrefix | None:
        """From now on its pages are whoever's took it."""
        return self._kept.pop(session, None)

    def put_back(self, session: str, kept: CachedPrefix) -> None:
        """Whoever took it added nothing to it."""
        self.give_up(session)
        self._kept[session] = kept

    def give_up(self, session: str) -> None:
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._pool.give_back(kept.table)

    def give_up_one(self) -> bool:
        """The longest unused one; whether there was any."""
        first = next(iter(self._kept), None)
        if first is not None:
            self.give_up(first)
        return first is not None

    def give_up_all(self) -> None:
        while self.give_up_one():
            pass
