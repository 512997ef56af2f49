"""Copies of a session's cached keys and values out of an engine and into it, in all layers,
including layers in other processes.

While a copy is under way the session is not cached, and its page table belongs to the copy. Knows
no file and no connection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, FleetError, OutOfPages, SessionInterrupted, failure_of
from fleet.core.session_parts import SessionLayout, SessionLimits
from fleet.engine.capabilities import SavedSession, SessionCopied
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.pass_queue import FAILURES, PassQueue
from fleet.engine.torch.prefix import CachedPrefix, Prefix, PrefixCache
from fleet.engine.torch.program import TaskT


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCopy:
    """A copy under way. `own`: keys and values in the layers of this process; `loads`: True if
    `own` is still to be written to the pool (load), False if it was read from there (save).
    """

    session: str
    cached: CachedPrefix
    own: Sequence[NDArray[np.uint8]]
    loads: bool = False


class SessionCopies(Generic[TaskT]):
    """Cached sessions of one engine, and their copies out of the engine and into it."""

    def __init__(
        self, pool: KVPool, cache: PrefixCache, passes: PassQueue[TaskT], tapped_width: int
    ) -> None:
        """Prepare copies of the sessions in `cache`. `tapped_width`: number of values per position
        of the tapped layer, as in `Program`.
        """
        self._pool = pool
        self._cache = cache
        self._passes = passes
        self._first_layer = passes.first_layer
        shape, dtype = pool.shape, str(pool.data.dtype).removeprefix("torch.")
        self.limits = SessionLimits(
            layout=SessionLayout(
                dtype=dtype, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
            ),
            num_layers=shape.num_layers + passes.num_other_layers,
            max_rows=pool.num_pages * pool.page_size,
            tapped_width=tapped_width,
        )
        self._running: dict[int, SessionCopy] = {}
        self._dropped: set[int] = set()
        self._done: list[SessionCopied] = []
        self._num_begun = 0

    def begin_save(self, session: str) -> None:
        """Begin to copy what is cached for a session. Until the copy has ended, no request can
        reuse the cached positions. Raises: BadInput if nothing is cached for the session.
        """
        cached = self._cache.take(session)
        if cached is None:
            raise BadInput(
                "no rows of the session are cached, or a turn of it is in progress; try again "
                "when it has ended"
            )
        try:
            own = self._pool.read_rows(cached.table, len(cached.prefix.keys))
        except FAILURES as error:
            self._cache.put_back(session, cached)
            raise failure_of("the rows of the session cannot be copied", error) from error
        self._begin(SessionCopy(session=session, cached=cached, own=own), None)

    def begin_load(self, session: str, saved: SavedSession) -> None:
        """Begin to load a saved copy into the cache of a session. The copy replaces what is cached
        for the session; other sessions may be dropped to make room.

        Raises: BadInput if the copy is incomplete or belongs to another model; OutOfPages if too
        few pages are free. After an error, the sessions that are cached already stay cached.
        """
        self._check(saved)
        if self._pool.pages_for(saved.num_rows) > self._pool.num_free + self._cache.num_pages:
            raise OutOfPages(
                f"the session has {saved.num_rows} rows, and too few pages of the KV pool are "
                "free; try again"
            )
        table = self._pool.open_table()
        while not self._pool.grow(table, saved.num_rows, clean=False):
            self._cache.drop_oldest()
        first = self._first_layer
        own = saved.layers[first : first + self._pool.shape.num_layers]
        cached = CachedPrefix(prefix=Prefix(keys=saved.keys, tapped=saved.tapped), table=table)
        self._begin(SessionCopy(session=session, cached=cached, own=own, loads=True), saved)

    def _check(self, saved: SavedSession) -> None:
        """Check that a saved copy is complete and fits this model, before anything is allocated or
        dropped. Raises: BadInput.
        """
        self.limits.check(saved.num_rows, len(saved.layers), saved.layout)
        wanted = saved.num_rows * self.limits.layout.row_bytes
        found = {layer.nbytes for layer in saved.layers} - {wanted}
        if found or saved.keys.shape != (saved.num_rows,):
            sizes = (
                f"{len(saved.keys)} keys, and layers of {min(found, default=wanted)} bytes "
                f"instead of {wanted}"
            )
            raise BadInput(f"the file of {saved.num_rows} rows has {sizes}")
        self.limits.check_tapped(saved.num_rows, {at: row.size for at, row in saved.tapped.items()})
        lacking = [at for at in np.flatnonzero(saved.keys < 0).tolist() if at not in saved.tapped]
        if self.limits.tapped_width and lacking:
            raise BadInput(
                f"the file lacks the tapped rows of {len(lacking)} positions, the first is "
                f"{lacking[0]}"
            )

    def _begin(self, copy: SessionCopy, saved: SavedSession | None) -> None:
        self._num_begun += 1
        self._running[self._num_begun] = copy
        keys = copy.cached.prefix.keys
        begin = self._passes.copy_rows(
            self._num_begun, copy.cached.table, keys, saved.layers if saved is not None else None
        )
        if not begin:
            self._end(self._num_begun, {}, None)

    def num_rows(self, session: str) -> int:
        return self._cache.num_rows(session)

    def drop(self, session: str | None = None) -> None:
        """Drop what is cached for a session, or for all sessions if `session` is None. Pages of a
        copy under way are dropped when the copy has ended.
        """
        self._dropped |= {
            number for number, copy in self._running.items() if session in (None, copy.session)
        }
        if session is None:
            self._cache.drop_all()
        else:
            self._cache.drop(session)

    def take_copied(self) -> Sequence[SessionCopied]:
        """Return, once, the results of the copies that have ended since the last call."""
        for number, layers, error in self._passes.take_copied():
            if number in self._running:
                self._end(number, layers, error)
        done, self._done = self._done, []
        return done

    def _end(
        self, number: int, others: dict[int, NDArray[np.uint8]], error: FleetError | None
    ) -> None:
        copy = self._running.pop(number)
        saved, is_dropped = None, number in self._dropped
        self._dropped.discard(number)
        if is_dropped and copy.loads and error is None:
            error = SessionInterrupted("the session was dropped while it was loaded; load it again")
        if is_dropped or (error is not None and copy.loads):
            self._pool.close_table(copy.cached.table)
        else:
            error = self._return_to_cache(copy) or error
        if error is None and not copy.loads:
            own = {self._first_layer + at: rows for at, rows in enumerate(copy.own)}
            layers = [rows for _, rows in sorted((own | others).items())]
            prefix = copy.cached.prefix
            saved = SavedSession(
                num_rows=len(prefix.keys),
                keys=prefix.keys,
                layers=layers,
                layout=str(self.limits.layout),
                tapped=dict(prefix.tapped),
            )
        self._done.append(SessionCopied(session=copy.session, saved=saved, error=error))

    def _return_to_cache(self, copy: SessionCopy) -> FleetError | None:
        """Cache the copy's session again, unless a turn of the session has ended while it was being
        saved: what that turn cached is newer.

        Return an error if loaded keys and values cannot be written to the pool, else None.
        """
        if self._cache.num_rows(copy.session) and not copy.loads:
            self._pool.close_table(copy.cached.table)
            return None
        if copy.loads:  # only now: passes that were running may have used these pages
            try:
                self._pool.write_rows(copy.cached.table, copy.own)
            except FAILURES as error:
                self._pool.close_table(copy.cached.table)
                return failure_of("the rows of the session cannot be written", error)
        self._cache.put_back(copy.session, copy.cached)
        return None
