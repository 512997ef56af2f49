"""The kept voice sessions of one host. Records are compressed and opaque. All functions block."""

import zlib
from collections.abc import Sequence

import msgspec

from fleet.history.file import HistoryFile

TROUBLES = ("failed", "refused", "moved", "dropouts")
"""What may have gone wrong in a session: an answer failed; an answer was refused; another gateway
continued the session; the playback had gaps.
"""
_COLUMNS = "session, began_us, seen_us, ended_us, turns, key, why"
TAIL_CHARS = 8
"""Number of characters at the end of a session's id that a list shows while it hides the rest."""


class KeptSession(msgspec.Struct, frozen=True, kw_only=True):
    """A kept session. `seen_us`: time of the last record; `ended_us`: end of the session, 0 while
    none is known; both, and `began_us`, in microseconds since 1970. `key`: name of the API key.
    `why`: what went wrong, in words of `TROUBLES`. `record`: the session, encoded by the gateway.
    """

    session: str
    began_us: int
    seen_us: int
    ended_us: int = 0
    num_turns: int = 0
    key: str = ""
    why: tuple[str, ...] = ()
    record: bytes = b""


class KeptSessionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of kept sessions. An empty or zero field matches every session. `state`: `ended` for
    those that are known to have ended, `unknown` for others. `text`: part of the id. `from_us`,
    `to_us`: a session matches if it was live at some time between them.
    """

    state: str = ""
    why: str = ""
    key: str = ""
    text: str = ""
    from_us: int = 0
    to_us: int = 0


class KeptSessionStore:
    """The kept voice sessions in the host's file, which also has the kept answers and incidents.

    Raises: OSError if the folder cannot be made; sqlite3.Error if the file cannot be read or
    written.
    """

    def __init__(self, file: HistoryFile) -> None:
        self._file = file

    def keep(self, kept: KeptSession) -> None:
        """Keep a session, in place of an earlier record with a `seen_us` that is not greater. A
        record with an older `seen_us`, which a gateway may write after it has lost the session to
        another gateway, is ignored.
        """
        record = zlib.compress(kept.record)
        with self._file.adding(kept.seen_us) as file:
            file.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session) DO "
                "UPDATE SET seen_us = excluded.seen_us, ended_us = excluded.ended_us, "
                "turns = excluded.turns, why = excluded.why, size = excluded.size, "
                "record = excluded.record "
                "WHERE excluded.seen_us >= seen_us",
                (
                    kept.session,
                    kept.began_us,
                    kept.seen_us,
                    kept.ended_us,
                    kept.num_turns,
                    kept.key,
                    " ".join(kept.why),
                    len(record),
                    record,
                ),
            )

    def read(self, session: str) -> KeptSession | None:
        """Return a kept session with its record, by its id or the last `TAIL_CHARS` of it; None if
        there is none.
        """
        if not self._file.exists:
            return None
        with self._file.open() as file:
            row = file.execute(
                f"SELECT {_COLUMNS}, record FROM sessions "
                "WHERE session = ? OR (? = ? AND substr(session, ?) = ?) LIMIT 1",
                (session, len(session), TAIL_CHARS, -TAIL_CHARS, session),
            ).fetchone()
        return _session(row[:-1], zlib.decompress(row[-1])) if row is not None else None

    def newest(
        self, limit: int, wanted: KeptSessionFilter, *, before_us: int = 0
    ) -> Sequence[KeptSession]:
        """Return at most `limit` kept sessions without their records, the latest begun first.
        `before_us`: return only sessions that began before this time; 0 for all.
        """
        if not self._file.exists:
            return []
        clauses = {
            "began_us < ?": before_us,
            "instr(' ' || why || ' ', ' ' || ? || ' ')": wanted.why,
            "key = ?": wanted.key,
            "instr(session, ?)": wanted.text,
            "(ended_us > 0) + 1 = ?": {"unknown": 1, "ended": 2}.get(wanted.state, 0),
            "max(seen_us, ended_us) >= ?": wanted.from_us,
            "began_us <= ?": wanted.to_us,
        }
        used = {clause: value for clause, value in clauses.items() if value}
        where = f" WHERE {' AND '.join(used)}" if used else ""
        with self._file.open() as file:
            rows = file.execute(
                f"SELECT {_COLUMNS} FROM sessions{where} ORDER BY began_us DESC LIMIT ?",
                (*used.values(), limit),
            ).fetchall()
        return [_session(row) for row in rows]


def _session(row: Sequence[object], record: bytes = b"") -> KeptSession:
    session, began_us, seen_us, ended_us, turns, key, why = row
    return KeptSession(
        session=str(session),
        began_us=int(str(began_us)),
        seen_us=int(str(seen_us)),
        ended_us=int(str(ended_us)),
        num_turns=int(str(turns)),
        key=str(key),
        why=tuple(str(why).split()),
        record=record,
    )
