"""The kept answers of one host.

Blobs are compressed and opaque. All functions block, and hold the interpreter lock for a few
milliseconds at most: SQLite and zlib release it.
"""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from fleet.core.ids import RequestId
from fleet.history.file import HistoryFile


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
    """The answers in the host's file.

    Raises: OSError if the folder cannot be made; sqlite3.Error if the file cannot be read or
    written.
    """

    def __init__(self, file: HistoryFile) -> None:
        self._file = file

    def keep(self, answer: KeptAnswer) -> None:
        """Keep an answer, with its record and sound in place of earlier ones of the same request.
        Reasons are added to the earlier reasons; an earlier pin and the earlier `kept_us` stay.
        """
        record = zlib.compress(answer.record)
        with self._file.adding(answer.kept_us) as file:
            before = file.execute(
                "SELECT why, sound FROM answers WHERE request = ?", (answer.request,)
            ).fetchone()
            earlier, kept_sound = before or ("", b"")
            why = dict.fromkeys([*earlier.split(), *answer.why])
            sound = answer.sound or kept_sound
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

    def pin(self, request: RequestId, *, pinned: bool) -> bool:
        """Pin a kept answer, so that it is not deleted for its age, or unpin it. Return False if
        the answer is not kept.
        """
        if not self._file.exists:
            return False
        with self._file.open() as file:
            changed = file.execute(
                "UPDATE answers SET pinned = ? WHERE request = ?", (pinned, request)
            )
            return changed.rowcount > 0

    def read(self, request: RequestId) -> KeptAnswer | None:
        """Return a kept answer with its blobs, or None."""
        if not self._file.exists:
            return None
        with self._file.open() as file:
            row = file.execute(
                "SELECT request, kept_us, why, pinned, record, sound FROM answers "
                "WHERE request = ?",
                (request,),
            ).fetchone()
        if row is None:
            return None
        *head, record, sound = row
        return _answer(head, zlib.decompress(record), sound)

    def has_sound(self, request: RequestId) -> bool:
        """Return True if the sound of an answer is kept."""
        if not self._file.exists:
            return False
        with self._file.open() as file:
            row = file.execute(
                "SELECT length(sound) FROM answers WHERE request = ?", (request,)
            ).fetchone()
        return row is not None and row[0] > 0

    def newest(self, limit: int, *, before_us: int = 0, why: str = "") -> Sequence[KeptAnswer]:
        """Return at most `limit` kept answers without their blobs, the newest first. `before_us`:
        return only answers kept before this time; 0 for all. `why`: return only answers with this
        reason; "" for all.
        """
        if not self._file.exists:
            return []
        with self._file.open() as file:
            rows = file.execute(
                "SELECT request, kept_us, why, pinned FROM answers WHERE (? = 0 OR kept_us < ?) "
                "AND (? = '' OR instr(' ' || why || ' ', ' ' || ? || ' ')) "
                "ORDER BY kept_us DESC LIMIT ?",
                (before_us, before_us, why, why, limit),
            ).fetchall()
        return [_answer(row) for row in rows]

    def counts(self) -> Mapping[str, int]:
        """Return the number of kept answers by reason; an answer counts for each of its reasons.
        The key "" has the number of all kept answers. The mapping is empty if nothing was ever
        kept.
        """
        if not self._file.exists:
            return {}
        with self._file.open() as file:
            rows = file.execute("SELECT why, count(*) FROM answers GROUP BY why").fetchall()
        found: Counter[str] = Counter()
        for why, count in rows:
            found.update(dict.fromkeys(["", *str(why).split()], int(count)))
        return found

    def size(self) -> int:
        """Return the size of all blobs of the file in bytes."""
        return self._file.size()


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
