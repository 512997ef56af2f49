"""The kept answers and incidents of one host, in an SQLite file within a budget of bytes and days.

Blobs are compressed and opaque. All functions block, and hold the interpreter lock for a few
milliseconds at most: SQLite and zlib release it.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from fleet.core.ids import RequestId
from fleet.process.private import make_private_folder

FILE = "answers.sqlite3"
BUSY_S = 10.0
DAY_US = 86_400 * 1_000_000
FREED_SHARE = 0.05
"""Share of the budget that is freed at once when it is exhausted."""
INCIDENT_SHARE = 1 / 8
"""Share of the budget that incidents may take from the answers. One of an hour takes about 200 kB:
32 MiB are the incidents of a bad fortnight.
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    request TEXT PRIMARY KEY, kept_us INTEGER NOT NULL, why TEXT NOT NULL,
    pinned INTEGER NOT NULL, size INTEGER NOT NULL, record BLOB NOT NULL, sound BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON answers (pinned, kept_us);
CREATE TABLE IF NOT EXISTS incidents (
    id TEXT PRIMARY KEY, begin_us INTEGER NOT NULL, summary BLOB NOT NULL, record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS incidents_by_time ON incidents (begin_us);
"""


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A kept answer. `kept_us`: when it was kept, microseconds since 1970. `why`: reasons, each one
    of `choice.REASONS`. `record`: the trace with all that belongs to it, encoded by the gateway.
    `sound`: the audio, encoded; b"" if it was not kept.
    """

    request: RequestId
    kept_us: int
    why: tuple[str, ...]
    pinned: bool = False
    record: bytes = b""
    sound: bytes = b""


class KeptIncident(msgspec.Struct, frozen=True, kw_only=True):
    """A kept incident. `begin_us`: time of the first trouble, microseconds since 1970. `summary`:
    what a list shows; `record`: all that a page shows; both encoded by the gateway.
    """

    id: str
    begin_us: int
    summary: bytes = b""
    record: bytes = b""


class HistoryStore:
    """The file in a folder for this user alone, which the first kept answer or incident makes.
    `max_bytes`: size of all blobs together, pinned ones included; `days`: how long an answer is
    kept unless it is pinned, and an incident. Several processes may have it open.

    Raises: OSError if the folder cannot be made; sqlite3.Error if the file cannot be read or
    written.
    """

    def __init__(self, folder: Path, max_bytes: int, days: int) -> None:
        self._path = folder / FILE
        self._max_bytes = max_bytes
        self._kept_us = days * DAY_US

    def keep(self, answer: KeptAnswer) -> None:
        """Keep an answer, in place of what was kept of the same request, whose reasons and pin are
        added to its own. Then remove what is too old, and the oldest answers beyond the budget;
        pinned ones last.
        """
        record, sound = zlib.compress(answer.record), answer.sound
        with self._change() as file:
            before = file.execute(
                "SELECT why FROM answers WHERE request = ?", (answer.request,)
            ).fetchone()
            why = dict.fromkeys([*(before[0].split() if before else ()), *answer.why])
            file.execute(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (request) DO UPDATE "
                "SET why = excluded.why, pinned = max(pinned, excluded.pinned), "
                "size = excluded.size, record = excluded.record, sound = excluded.sound",
                (
                    answer.request,
                    answer.kept_us,
                    " ".join(why),
                    answer.pinned,
                    len(record) + len(sound),
                    record,
                    sound,
                ),
            )
            self._trim(file, answer.kept_us)

    def pin(self, request: RequestId, *, pinned: bool) -> bool:
        """Keep an answer beyond its days, or no longer; return False if it is not kept at all."""
        if not self._path.exists():
            return False
        with self._open() as file:
            changed = file.execute(
                "UPDATE answers SET pinned = ? WHERE request = ?", (pinned, request)
            )
            return changed.rowcount > 0

    def read(self, request: RequestId) -> KeptAnswer | None:
        """Return a kept answer with its blobs, or None."""
        if not self._path.exists():
            return None
        with self._open() as file:
            row = file.execute(
                "SELECT request, kept_us, why, pinned, record, sound FROM answers "
                "WHERE request = ?",
                (request,),
            ).fetchone()
        if row is None:
            return None
        *head, record, sound = row
        return _answer(head, zlib.decompress(record), sound)

    def newest(self, limit: int, *, before_us: int = 0, why: str = "") -> Sequence[KeptAnswer]:
        """Return kept answers without their blobs, the newest first. `before_us`: only those kept
        earlier; 0 for all. `why`: only those with this reason; "" for all.
        """
        if not self._path.exists():
            return []
        with self._open() as file:
            rows = file.execute(
                "SELECT request, kept_us, why, pinned FROM answers WHERE (? = 0 OR kept_us < ?) "
                "AND (? = '' OR instr(' ' || why || ' ', ' ' || ? || ' ')) "
                "ORDER BY kept_us DESC LIMIT ?",
                (before_us, before_us, why, why, limit),
            ).fetchall()
        return [_answer(row) for row in rows]

    def keep_incident(self, incident: KeptIncident, now_us: int) -> None:
        """Keep an incident, in place of what was kept under its id. Then remove those that are too
        old, and the oldest beyond their share of the budget.
        """
        record = zlib.compress(incident.record)
        with self._change() as file:
            file.execute(
                "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?)",
                (incident.id, incident.begin_us, incident.summary, record),
            )
            file.execute("DELETE FROM incidents WHERE begin_us < ?", (now_us - self._kept_us,))
            excess = _incident_bytes(file) - self._max_bytes * INCIDENT_SHARE
            sizes = file.execute(f"SELECT id, {_SIZE} FROM incidents ORDER BY begin_us")
            _remove(file, "incidents", "id", sizes, excess)
            self._trim(file, now_us)

    def incident(self, incident: str) -> KeptIncident | None:
        """Return a kept incident with its record, or None."""
        if not self._path.exists():
            return None
        with self._open() as file:
            row = file.execute(
                "SELECT id, begin_us, summary, record FROM incidents WHERE id = ?", (incident,)
            ).fetchone()
        if row is None:
            return None
        known, begin_us, summary, record = row
        record = zlib.decompress(record)
        return KeptIncident(id=known, begin_us=begin_us, summary=summary, record=record)

    def incidents(self, limit: int, *, before_us: int = 0) -> Sequence[KeptIncident]:
        """Return kept incidents without their records, the newest first. `before_us`: only those
        that began earlier; 0 for all.
        """
        if not self._path.exists():
            return []
        with self._open() as file:
            rows = file.execute(
                "SELECT id, begin_us, summary FROM incidents WHERE ? = 0 OR begin_us < ? "
                "ORDER BY begin_us DESC LIMIT ?",
                (before_us, before_us, limit),
            ).fetchall()
        return [KeptIncident(id=one, begin_us=at, summary=summary) for one, at, summary in rows]

    def size(self) -> int:
        """Return the size of all blobs in bytes."""
        if not self._path.exists():
            return 0
        with self._open() as file:
            return _answer_bytes(file) + _incident_bytes(file)

    def _trim(self, file: sqlite3.Connection, now_us: int) -> None:
        file.execute(
            "DELETE FROM answers WHERE pinned = 0 AND kept_us < ?", (now_us - self._kept_us,)
        )
        total = _answer_bytes(file) + _incident_bytes(file)
        if total <= self._max_bytes:
            return
        excess = total - self._max_bytes * (1 - FREED_SHARE)
        oldest = file.execute("SELECT request, size FROM answers ORDER BY pinned, kept_us")
        _remove(file, "answers", "request", oldest, excess)

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Open the file for a change, and make it first if there is none."""
        make_private_folder(self._path.parent)
        self._path.touch(mode=0o600)
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            yield file

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction. A connection per call: calls come from any thread."""
        opened = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        with closing(opened) as file, file:
            file.execute("PRAGMA journal_mode = WAL")
            file.executescript(_SCHEMA)
            yield file


_SIZE = "length(summary) + length(record)"


def _answer_bytes(file: sqlite3.Connection) -> int:
    return int(file.execute("SELECT coalesce(sum(size), 0) FROM answers").fetchone()[0])


def _incident_bytes(file: sqlite3.Connection) -> int:
    return int(file.execute(f"SELECT coalesce(sum({_SIZE}), 0) FROM incidents").fetchone()[0])


def _remove(
    file: sqlite3.Connection,
    table: str,
    key: str,
    oldest: Iterable[tuple[str, int]],
    excess: float,
) -> None:
    """Remove rows in the order of `oldest` (key and size) until `excess` bytes are freed."""
    removed: list[tuple[str]] = []
    for name, size in oldest:
        if excess <= 0:
            break
        removed.append((name,))
        excess -= size
    file.executemany(f"DELETE FROM {table} WHERE {key} = ?", removed)


def _answer(head: Sequence[object], record: bytes = b"", sound: bytes = b"") -> KeptAnswer:
    request, kept_us, why, pinned = head
    return KeptAnswer(
        request=RequestId(str(request)),
        kept_us=int(str(kept_us)),
        why=tuple(str(why).split()),
        pinned=bool(pinned),
        record=record,
        sound=sound,
    )
