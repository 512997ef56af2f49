"""Copies of a session's cached rows out of an engine and into it, of all layers, also of those in other processes.

While a copy is under way the session is not cached, and its table belongs to the copy. Knows no file and no connection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, FleetError, OutOfPages, SessionInterrupted
from fleet.engine.base import SavedSession, SessionCopied
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.pass_queue import PassQueue
from fleet.engine.torch.prefix import CachedPrefix, Prefix, PrefixCache
from fleet.engine.torch.program import TaskT


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCopy:
    """A copy under way. `own`: this process's layers; `loads`: they are to be written."""

    session: str
    cached: CachedPrefix
    own: Sequence[NDArray[np.uint8]]
    loads: bool = False


class SessionCopies(Generic[TaskT]):
    """The copies of one engine."""

    def __init__(self, pool: KVPool, cache: PrefixCache, passes: PassQueue[TaskT]) -> None:
        self._pool, self._cache, self._passes = pool, cache, passes
        self._first_layer = passes.first_layer
        self._num_layers = pool.shape.num_layers + passes.num_other_layers
        self._running: dict[int, SessionCopy] = {}
        self._dropped: set[int] = set()
        self._done: list[SessionCopied] = []
        self._num_begun = 0

    @property
    def layout(self) -> str:
        shape, dtype = self._pool.shape, str(self._pool.data.dtype).removeprefix("torch.")
        return f"{dtype}, {shape.num_kv_heads} heads of {shape.head_dim}"

    def begin_save(self, session: str) -> None:
        """Begin to copy a session's rows. Raises: BadInput if none are cached."""
        cached = self._cache.take(session)
        if cached is None:
            raise BadInput("no rows of the session are cached, or a turn of it is in progress; try again when it has ended")
        own = self._pool.read_rows(cached.table, len(cached.prefix.keys))
        self._begin(SessionCopy(session=session, cached=cached, own=own), None)

    def begin_load(self, session: str, saved: SavedSession) -> None:
        """Begin to cache rows as a session's. Raises: BadInput if they are another model's; OutOfPages."""
        if saved.layout != self.layout or len(saved.layers) != self._num_layers:
            raise BadInput(
                f"the file has {len(saved.layers)} layers of {saved.layout}, this model {self._num_layers} of {self.layout}"
            )
        table = self._pool.open_table()
        while not self._pool.grow(table, saved.num_rows, clean=False):
            if not self._cache.drop_oldest():
                self._pool.close_table(table)
                raise OutOfPages(f"the session has {saved.num_rows} rows, and too few pages of the KV pool are free; try again")
        first = self._first_layer
        own = saved.layers[first : first + self._pool.shape.num_layers]
        cached = CachedPrefix(prefix=Prefix(keys=saved.keys, tapped=saved.tapped), table=table)
        self._begin(SessionCopy(session=session, cached=cached, own=own, loads=True), saved)

    def _begin(self, copy: SessionCopy, saved: SavedSession | None) -> None:
        self._num_begun += 1
        self._running[self._num_begun] = copy
        keys = copy.cached.prefix.keys
        begin = self._passes.copy_rows(self._num_begun, copy.cached.table, keys, saved.layers if saved is not None else None)
        if not begin:
            self._end(self._num_begun, {}, None)

    def drop(self, session: str | None) -> None:
        """Cache the rows of a session, or of all, no more once their copies have ended."""
        self._dropped |= {number for number, copy in self._running.items() if session in (None, copy.session)}

    def take_done(self) -> Sequence[SessionCopied]:
        """Return the copies that have ended."""
        for number, layers, error in self._passes.take_copied():
            if number in self._running:
                self._end(number, layers, error)
        done, self._done = self._done, []
        return done

    def _end(self, number: int, others: dict[int, NDArray[np.uint8]], error: FleetError | None) -> None:
        copy = self._running.pop(number)
        saved, is_dropped = None, number in self._dropped
        self._dropped.discard(number)
        if is_dropped and copy.loads and error is None:
            error = SessionInterrupted("the session was dropped while it was loaded; load it again")
        if is_dropped or (error is not None and copy.loads):
            self._pool.close_table(copy.cached.table)
        else:
            self._return_to_cache(copy)
        if error is None and not copy.loads:
            own = {self._first_layer + at: rows for at, rows in enumerate(copy.own)}
            layers = [rows for _, rows in sorted((own | others).items())]
            prefix = copy.cached.prefix
            saved = SavedSession(
                num_rows=len(prefix.keys), keys=prefix.keys, layers=layers, layout=self.layout, tapped=dict(prefix.tapped)
            )
        self._done.append(SessionCopied(session=copy.session, saved=saved, error=error))

    def _return_to_cache(self, copy: SessionCopy) -> None:
        """Cache the rows again, unless a turn of the session has ended meanwhile, whose rows are newer."""
        if self._cache.num_rows(copy.session) and not copy.loads:
            self._pool.close_table(copy.cached.table)
            return
        if copy.loads:  # only now: passes that were running may have used these pages
            self._pool.write_rows(copy.cached.table, copy.own)
        self._cache.put_back(copy.session, copy.cached)
