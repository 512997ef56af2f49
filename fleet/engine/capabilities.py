"""Optional capabilities of an engine, with their data. Every capability is an attribute of
`Engine`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId
from fleet.core.pages import Memory, PagesRef
from fleet.core.session_parts import SessionLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlocks:
    """Keys and values of a request's first `num_rows` positions for another engine: a copy of the
    pages that hold them, or a description of where the other engine reads them.

    Shapes: `data` is uint8 [bytes], readable by engines of the same stage and configuration.
    """

    num_rows: int
    data: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPages:
    """Pages of an engine's KV pool that belong to no request and hold keys and values of `num_rows`
    positions: full pages lent to another engine, which reads them, or empty pages reserved as the
    destination of such a read. `table` is private to the engine.
    """

    num_rows: int
    at: PagesRef
    table: object


class KVPagePool(Protocol):
    """Engine's KV pool whose pages other processes read in place."""

    @property
    def memory(self) -> Memory | None:
        """Memory of the pages; None if other processes cannot read it."""
        ...

    def num_bytes(self, num_rows: int) -> int:
        """Return the size of the exported blocks of `num_rows` positions, at most the size of the
        whole pool.
        """
        ...

    def lend(self, request_id: RequestId) -> KVPages | None:
        """Finish a request and lend its pages to another engine, which reads them in place, until
        `free`.

        Return None without effect if the pages cannot be lent, for example because no position is
        computed, the pool is short of pages, or the pages are to be cached for the request's
        session.
        """
        ...

    def may_lend(self) -> bool:
        """Return True if enough pages of the pool are free that more pages may be lent."""
        ...

    def reserve(self, num_rows: int) -> KVPages | None:
        """Reserve pages for keys and values of `num_rows` positions read from another engine, until
        `import_pages` or `free`. Cached prefixes are dropped to make room; return None if the pool
        is still short of pages.
        """
        ...

    def free(self, pages: KVPages) -> None:
        """Free pages that were lent or reserved, and that no engine reads or writes any more."""
        ...

    def import_pages(self, request_id: RequestId, pages: KVPages) -> bool:
        """Give reserved pages, filled with another engine's keys and values, to a request that has
        its input and has not been computed yet.

        Return False if the request cannot use the pages, which then stay reserved until `free`; the
        engine computes the positions itself, with the same result.
        """
        ...


class KVTransfer(Protocol):
    """Hand-off of computed keys and values to another engine. `pages` is the engine's pool if other
    processes can read and fill its pages in place, else None.
    """

    @property
    def pages(self) -> KVPagePool | None: ...

    def export_blocks(self, request_id: RequestId) -> KVBlocks | None:
        """Return the keys and values of a request's computed positions, or where another engine
        reads them; None if no position is computed.
        """
        ...

    def import_blocks(self, request_id: RequestId, blocks: KVBlocks) -> bool:
        """Give another engine's keys and values to a request that has its input and has not been
        computed yet.

        Return False if the request cannot use them; the engine then computes the positions itself,
        with the same result.
        """
        ...


class CachedPrefixes(Protocol):
    """Cache of the keys and values of ended requests, by session. Cached positions are dropped
    whenever a running request needs the memory.
    """

    def num_rows(self, session: str) -> int:
        """Return the number of positions cached for a session."""
        ...

    def drop(self, session: str | None = None) -> None:
        """Drop what is cached for a session, or for all sessions if `session` is None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """Copy of the keys and values that an engine caches for a session, in all layers of the model.
    `layout`: dtype and sizes, which must be the same where the copy is loaded.

    Shapes: `keys` int64 [N], which identify the N cached positions by their content; `layers` uint8
    [N x bytes of keys and values of a position], one array per layer in order.
    `tapped`: hidden states that are sent to the next stage, by position.
    """

    num_rows: int
    keys: np.ndarray
    layers: Sequence[np.ndarray]
    layout: str
    tapped: Mapping[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCopied:
    """Result of a finished copy of a session, out of the engine or into it. `saved`: the copy, if
    the session was saved without error. `error`: cause of a failure.
    """

    session: str
    saved: SavedSession | None = None
    error: FleetError | None = None


class SessionCopying(Protocol):
    """Saving of cached sessions from an engine, and loading of saved sessions into it."""

    @property
    def limits(self) -> SessionLimits:
        """Limits that a session must meet to be saved from this engine or loaded into it."""
        ...

    def begin_save(self, session: str) -> None:
        """Begin to copy what is cached for a session. Until the copy has ended, no request can
        reuse the cached positions. Raises: BadInput if nothing is cached for the session.
        """
        ...

    def begin_load(self, session: str, saved: SavedSession) -> None:
        """Begin to load a saved copy into the cache of a session, so that its next turn can reuse
        it. The copy replaces what is cached for the session; other sessions may be dropped to make
        room.

        Raises: BadInput if the copy is incomplete or belongs to another model; OutOfPages if too
        few pages are free. After an error, the sessions that are cached already stay cached.
        """
        ...

    def take_copied(self) -> Sequence[SessionCopied]:
        """Return, once, the results of the copies that have finished since the last call."""
        ...


class BackgroundWork(Protocol):
    """Parts of an engine's steps that run in other processes or threads."""

    def await_pass(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until a part of the work ends; return False if no work is running,
        or if the time is over.
        """
        ...


class RemotePasses(Protocol):
    """Steps of a model whose layers are divided among processes, as the worker of the stage sees
    them.
    """

    def accepts_requests(self) -> bool:
        """Return False while some layers have no process, so that other workers should get new
        requests.
        """
        ...

    def outage(self) -> FleetError | None:
        """Return the error with which to fail all requests if layers have been missing for too
        long, else None.
        """
        ...

    def take_suspects(self) -> Sequence[RequestId]:
        """Return, once, the requests whose steps were running in another process when it died.

        Until this call nothing of those steps is sent to the process that replaces the dead one.
        """
        ...


class DrafterSelection(Protocol):
    """Choice of the drafter, which guesses tokens ahead for speculative decoding."""

    def use(self, name: str) -> None:
        """Switch to the drafter `name` from the next step on; `off` ends drafting. Raises: BadInput
        for a name that the engine lacks.
        """
        ...


class SampleStore(Protocol):
    """Training samples (hidden states of requests) that a trainer holds."""

    def forget_samples(self) -> int:
        """Delete all training samples; return how many were deleted."""
        ...
