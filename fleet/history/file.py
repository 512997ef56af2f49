"""The SQLite file of what one host keeps: its tables, and their budget of bytes and days. Knows no
content of a record.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fleet.process.private import make_private_folder

FILE = "answers.sqlite3"
BUSY_S = 10.0
DAY_US = 86_400 * 1_000_000
FREED_SHARE = 0.05
"""Share of the budget that is freed at once when it is exhausted."""
INCIDENT_SHARE = 1 / 8
"""Share of the budget that incidents may use. An incident that lasted an hour takes about 200 kB:
32 MiB hold the incidents of a bad fortnight.
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    request TEXT PRIMARY KEY, kept_us INTEGER NOT NULL, why TEXT NOT NULL,
    pinned INTEGER NOT NULL, size INTEGER NOT NULL, record BLOB NOT NULL, sound BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON answers (pinned, kept_us);
CREATE TABLE IF NOT EXISTS sessions (
    session TEXT PRIMARY KEY, began_us INTEGER NOT NULL, seen_us INTEGER NOT NULL,
    ended_us INTEGER NOT NULL, turns INTEGER NOT NULL, key TEXT NOT NULL, why TEXT NOT NULL,
    size INTEGER NOT NULL, record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sessions_by_time ON sessions (began_us);
CREATE TABLE IF NOT EXISTS incidents (
    id TEXT PRIMARY KEY, begin_us INTEGER NOT NULL, size INTEGER NOT NULL, summary BLOB NOT NULL,
    record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS incidents_by_time ON incidents (begin_us);
"""
_OLDEST_INCIDENTS = "SELECT 'incidents', id, size FROM incidents ORDER BY begin_us"
_OLDEST = """
SELECT 'answers', request, size, pinned, kept_us AS at_us FROM answers
UNION ALL SELECT 'sessions', session, size, 0, seen_us FROM sessions
ORDER BY pinned, at_us
"""
_DELETE = {
    "answers": "DELETE FROM answers WHERE request = ?",
    "sessions": "DELETE FROM sessions WHERE session = ?",
    "incidents": "DELETE FROM incidents WHERE id = ?",
}


class HistoryFile:
    """SQLite file in a folder that only this user can read; the first record creates both.
    `max_bytes`: size of all blobs together, pinned ones included; `days`: how long a record is kept
    unless it is pinned. Several processes may have the file open.
    """

    def __init__(self, folder: Path, max_bytes: int, days: int) -> None:
        self._path = folder / FILE
        self._max_bytes = max_bytes
        self._kept_us = days * DAY_US

    @property
    def exists(self) -> bool:
        return self._path.exists()

    @contextmanager
    def adding(self, now_us: int) -> Iterator[sqlite3.Connection]:
        """Open the file to add a record. Afterwards delete the records that are older than `days`,
        and then, if the budget is exceeded, the oldest records, pinned ones last. Raises: OSError,
        sqlite3.Error.
        """
        make_private_folder(self._path.parent)
        self._path.touch(mode=0o600)
        with self.open() as file:
            file.execute("BEGIN IMMEDIATE")
            yield file
            self._trim(file, now_us)

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction, with a connection of its own, since calls come from
        any thread. Waits up to `BUSY_S` for another writer. The journal stays SQLite's default: a
        change of `journal_mode` fails at once while another process writes.
        """
        opened = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        with closing(opened) as file, file:
            file.executescript(_SCHEMA)
            yield file

    def size(self) -> int:
        """Return the size of all blobs in bytes."""
        if not self.exists:
            return 0
        with self.open() as file:
            return sum(_size(file, table) for table in _DELETE)

    def _trim(self, file: sqlite3.Connection, now_us: int) -> None:
        oldest_us = now_us - self._kept_us
        file.execute("DELETE FROM answers WHERE pinned = 0 AND kept_us < ?", (oldest_us,))
        file.execute("DELETE FROM sessions WHERE seen_us < ?", (oldest_us,))
        file.execute("DELETE FROM incidents WHERE begin_us < ?", (oldest_us,))
        excess = _size(file, "incidents") - self._max_bytes * INCIDENT_SHARE
        _remove(file, _OLDEST_INCIDENTS, excess)
        total = sum(_size(file, table) for table in _DELETE)
        if total > self._max_bytes:
            _remove(file, _OLDEST, total - self._max_bytes * (1 - FREED_SHARE))


def _size(file: sqlite3.Connection, table: str) -> int:
    return int(file.execute(f"SELECT coalesce(sum(size), 0) FROM {table}").fetchone()[0])


def _remove(file: sqlite3.Connection, oldest: str, excess: float) -> None:
    """Remove rows in the order of a query (table, key, size) until `excess` bytes are freed."""
    if excess <= 0:
        return
    for table, name, size, *_ in file.execute(oldest).fetchall():
        file.execute(_DELETE[table], (name,))
        excess -= size
        if excess <= 0:
            return
