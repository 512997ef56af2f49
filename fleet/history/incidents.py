"""The kept incidents of one host. Records are compressed and opaque. All functions block."""

import zlib
from collections.abc import Sequence

import msgspec

from fleet.history.file import HistoryFile


class KeptIncident(msgspec.Struct, frozen=True, kw_only=True):
    """A kept incident. `begin_us`: time of the first trouble, microseconds since 1970. `summary`:
    what a list shows; `record`: all that a page shows; both encoded by the gateway.
    """

    id: str
    begin_us: int
    summary: bytes = b""
    record: bytes = b""


class KeptIncidentStore:
    """The kept incidents in the host's file, which also has the kept answers and sessions.

    Raises: OSError if the folder cannot be made; sqlite3.Error if the file cannot be read or
    written.
    """

    def __init__(self, file: HistoryFile) -> None:
        self._file = file

    def keep(self, kept: KeptIncident, now_us: int) -> None:
        """Keep an incident, in place of an earlier record with its id; delete records that have
        become too old or too many.
        """
        record = zlib.compress(kept.record)
        size = len(kept.summary) + len(record)
        with self._file.adding(now_us) as file:
            file.execute(
                "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?)",
                (kept.id, kept.begin_us, size, kept.summary, record),
            )

    def read(self, incident: str) -> KeptIncident | None:
        """Return a kept incident with its record, or None."""
        if not self._file.exists:
            return None
        with self._file.open() as file:
            row = file.execute(
                "SELECT id, begin_us, summary, record FROM incidents WHERE id = ?", (incident,)
            ).fetchone()
        if row is None:
            return None
        known, begin_us, summary, record = row
        record = zlib.decompress(record)
        return KeptIncident(id=known, begin_us=begin_us, summary=summary, record=record)

    def newest(self, limit: int, *, before_us: int = 0) -> Sequence[KeptIncident]:
        """Return at most `limit` kept incidents without their records, the newest first.
        `before_us`: return only incidents that began before this time; 0 for all.
        """
        if not self._file.exists:
            return []
        with self._file.open() as file:
            rows = file.execute(
                "SELECT id, begin_us, summary FROM incidents WHERE ? = 0 OR begin_us < ? "
                "ORDER BY begin_us DESC LIMIT ?",
                (before_us, before_us, limit),
            ).fetchall()
        return [KeptIncident(id=one, begin_us=at, summary=summary) for one, at, summary in rows]
