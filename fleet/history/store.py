"""The kept answers of one host, in an SQLite file within a budget of bytes and days.

Blobs are compressed and opaque. All functions block, and hold the interpreter lock for a few
milliseconds at most: SQLite and zlib release it.
"""

import sqlite3
import zlib
from collections.abc import Iterator, Sequence
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
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    request TEXT PRIMARY KEY, kept_us INTEGER NOT NULL, why TEXT NOT NULL,
    pinned INTEGER NOT NULL, size INTEGER NOT NULL, record BLOB NOT NULL, sound BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON answers (pinned, kept_us);
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


class HistoryStore:
    """The file in a folder for this user alone, which the first kept answer makes. `max_bytes`:
    size of all blobs together, pinned ones included; `days`: how long an answer is kept unless it
    is pinned. Several processes may have it open.

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
        make_private_folder(self._path.parent)
        self._path.touch(mode=0o600)
        with self._open() as file:
            file.executescript(_SCHEMA)
            file.execute("BEGIN IMMEDIATE")
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

    def size(self) -> int:
        """Return the size of all blobs in bytes."""
        if not self._path.exists():
            return 0
        with self._open() as file:
            return int(file.execute("SELECT coalesce(sum(size), 0) FROM answers").fetchone()[0])

    def _trim(self, file: sqlite3.Connection, now_us: int) -> None:
        file.execute(
            "DELETE FROM answers WHERE pinned = 0 AND kept_us < ?", (now_us - self._kept_us,)
        )
        (total,) = file.execute("SELECT coalesce(sum(size), 0) FROM answers").fetchone()
        if total <= self._max_bytes:
            return
        excess = total - self._max_bytes * (1 - FREED_SHARE)
        oldest = file.execute("SELECT request, size FROM answers ORDER BY pinned, kept_us")
        removed: list[tuple[str]] = []
        for request, size in oldest:
            if excess <= 0:
                break
            removed.append((request,))
            excess -= size
        file.executemany("DELETE FROM answers WHERE request = ?", removed)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction. A connection per call: calls come from any thread."""
        opened = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        with closing(opened) as file, file:
            file.execute("PRAGMA journal_mode = WAL")
            yield file


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
