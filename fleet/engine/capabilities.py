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
    """Copy of the keys and values of a request's first `num_rows` rows, as pages of their pool, or
    a description of where another engine reads them.

    Shapes: `data` is uint8 [bytes], readable by engines of the same stage and configuration.
    """

    num_rows: int
    data: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPages:
    """Pages of an engine's pool that belong to no request, for keys and values of `num_rows` rows:
    full pages lent for another engine to read, or empty pages reserved to read into. `table` is
    private to the engine.
    """

    num_rows: int
    at: PagesRef
    table: object


class KVPagePool(Protocol):
    """Pages of keys and values that other processes read in place."""

    @property
    def memory(self) -> Memory | None:
        """Memory of the pages, if another process can read it."""
        ...

    def num_bytes(self, num_rows: int) -> int:
        """Return the size of the exported blocks of `num_rows` rows, at most of the whole pool."""
        ...

    def lend(self, request_id: RequestId) -> KVPages | None:
        """Finish a request and lend its pages for another engine to read, until `free`.

        Return None without effect if nothing is computed or the pool is short of pages.
        """
        ...

    def reserve(self, num_rows: int) -> KVPages | None:
        """Reserve pages to read `num_rows` rows into, until `import_pages` or `free`; None if the
        pool is short of pages.
        """
        ...

    def free(self, pages: KVPages) -> None:
        """Free pages that were lent or reserved, and that no engine reads or writes any more."""
        ...

    def import_pages(self, request_id: RequestId, pages: KVPages) -> bool:
        """Give pages from `reserve`, filled with another engine's keys and values, to a request
        that has its input and has not been computed yet.

        Return False if the request cannot use them; the engine then computes the rows itself, with
        the same result.
        """
        ...


class KVTransfer(Protocol):
    """Hand-off of computed keys and values to another engine. `pages` is None unless other
    processes can read and fill pages in place.
    """

    @property
    def pages(self) -> KVPagePool | None: ...

    def export_blocks(self, request_id: RequestId) -> KVBlocks | None:
        """Return a request's computed rows, or where they are; None if there are none."""
        ...

    def import_blocks(self, request_id: RequestId, blocks: KVBlocks) -> bool:
        """Import another engine's keys and values for a request that has its input and has not
        been computed yet.

        Return False if the request cannot use them; the engine then computes the rows itself, with
        the same result.
        """
        ...


class CachedPrefixes(Protocol):
    """Cache of rows by session. Cached rows are dropped whenever a request needs the memory."""

    def num_rows(self, session: str) -> int:
        """Return the number of rows cached for a session."""
        ...

    def drop(self, session: str | None = None) -> None:
        """Drop the cached rows of a session, or of all sessions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """Copy of a session's cached rows, of all layers of the model. `layout`: dtype and sizes, which
    must be the same where the copy is loaded.

    Shapes: `keys` int64 [N], which identify the rows; `layers` uint8 [N x bytes of a row's keys and
    values], in order.
    `tapped`: hidden states that are sent to the next stage, by position.
    """

    num_rows: int
    keys: np.ndarray
    layers: Sequence[np.ndarray]
    layout: str
    tapped: Mapping[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCopied:
    """End of a copy. `saved`: the rows of a saved session. `error`: cause of a failure."""

    session: str
    saved: SavedSession | None = None
    error: FleetError | None = None


class SessionCopying(Protocol):
    """Copies of cached sessions, out of the engine and into it."""

    @property
    def limits(self) -> SessionLimits:
        """Sizes of the sessions that can be saved and loaded."""
        ...

    def begin_save(self, session: str) -> None:
        """Begin to copy the cached rows of a session. Raises: BadInput if none are cached."""
        ...

    def begin_load(self, session: str, saved: SavedSession) -> None:
        """Begin to cache the saved rows of a session, so that its next turn can reuse them.

        Raises: BadInput if the rows are incomplete or belong to another model; OutOfPages if too
        few pages are free. After an error, the sessions that are cached already stay cached.
        """
        ...

    def take_copied(self) -> Sequence[SessionCopied]:
        """Return the copies of sessions that have ended."""
        ...


class BackgroundWork(Protocol):
    """Work of a step in another process or thread, beside this one."""

    def await_pass(self, timeout_s: float) -> bool:
        """Wait until a part of the work ends; return False if there is none, or if the time is
        over.
        """
        ...


class RemotePasses(Protocol):
    """Passes of a model whose layers are divided among processes."""

    def accepts_requests(self) -> bool:
        """Return False while layers are missing, so that other workers should have new requests."""
        ...

    def outage(self) -> FleetError | None:
        """Return the error for all requests if layers were missing for too long."""
        ...

    def take_suspects(self) -> Sequence[RequestId]:
        """Return, once, the requests of passes that ran when another process died that computes
        parts of them.

        Until the call nothing of those passes is sent to the process that takes its place.
        """
        ...


class DrafterSelection(Protocol):
    """Choice of the drafter that guesses tokens ahead."""

    def use(self, name: str) -> None:
        """Draft with another drafter from the next step on; `off` ends drafting. Raises: BadInput
        for a name that the engine lacks.
        """
        ...


class SampleStore(Protocol):
    """Samples that a trainer holds."""

    def forget_samples(self) -> int:
        """Forget all samples; return their number."""
        ...
