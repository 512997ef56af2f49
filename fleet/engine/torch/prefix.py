"""Cache of the keys and values of ended requests, for the next request of their session: pages of
the KV pool, and keys that identify the positions stored in them.

Pages are moved and never shared, so a prefix serves one request at a time. Knows no scheduling and
no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from fleet.engine.torch.kv_pool import KVPool, PageTable

_NO_ID = -(1 << 63)
"""Bit that is set in every key made from contents and makes the key negative; token ids are not
negative.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Identity of a task's leading positions, by which the number of equal positions at the
    beginning of another request is found.

    Shapes: `keys` int64 [N], one per position from the first on; if two prefixes have equal keys up
    to a position, their inputs are equal up to it.
    `tapped`: the hidden states of the tapped layer that are sent to the next stage, by position.
    """

    keys: NDArray[np.int64]
    tapped: Mapping[int, NDArray[np.float32]] = field(
        default_factory=dict[int, NDArray[np.float32]]
    )


def content_key(content: bytes) -> int:
    """Return the key of a position whose input is `content` instead of a token id."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True) | _NO_ID


def content_keys(rows_NH: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the keys of input rows that are identified by their bytes: [N, H] -> int64 [N]."""
    return np.array([content_key(row.tobytes()) for row in np.ascontiguousarray(rows_NH)], np.int64)


def joined_keys(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


def num_equal_keys(keys: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    """Return the number of leading elements in which two key arrays are equal."""
    length = min(len(keys), len(others))
    different = np.flatnonzero(keys[:length] != others[:length])
    return int(different[0]) if len(different) else length


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """A prefix and the pages that hold its keys and values. Invariant: `prefix.keys` has one key
    per computed position.
    """

    prefix: Prefix
    table: PageTable


class PrefixCache:
    """Cached prefixes by session, in order of last use, the oldest first."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._prefixes: dict[str, CachedPrefix] = {}

    @property
    def num_pages(self) -> int:
        return sum(len(cached.table.pages) for cached in self._prefixes.values())

    def num_rows(self, session: str) -> int:
        cached = self._prefixes.get(session)
        return len(cached.prefix.keys) if cached is not None else 0

    def put(self, session: str, prefix: Prefix, table: PageTable, num_computed: int) -> None:
        """Move an ended request's page table into the cache, replacing an earlier prefix of the
        session. `num_computed`: number of the request's computed positions; if it is 0, nothing is
        cached and the table is closed.
        """
        self.drop(session)
        num_rows = min(len(prefix.keys), num_computed)
        if num_rows == 0:
            self._pool.close_table(table)
            return
        self._pool.shrink(table, num_rows)
        tapped = {position: row for position, row in prefix.tapped.items() if position < num_rows}
        self._prefixes[session] = CachedPrefix(
            prefix=Prefix(keys=prefix.keys[:num_rows], tapped=tapped), table=table
        )

    def take(self, session: str) -> CachedPrefix | None:
        """Remove and return the prefix of a session, whose pages now belong to the caller; None if
        nothing is cached.
        """
        return self._prefixes.pop(session, None)

    def put_back(self, session: str, cached: CachedPrefix) -> None:
        """Cache a session's prefix unchanged, for example one that `take` removed; drop what the
        cache has for the session meanwhile.
        """
        self.drop(session)
        self._prefixes[session] = cached

    def drop(self, session: str) -> None:
        cached = self._prefixes.pop(session, None)
        if cached is not None:
            self._pool.close_table(cached.table)

    def drop_oldest(self) -> bool:
        """Drop the least recently used prefix; return False if there is none."""
        first = next(iter(self._prefixes), None)
        if first is not None:
            self.drop(first)
        return first is not None

    def drop_all(self) -> None:
        while self.drop_oldest():
            pass
