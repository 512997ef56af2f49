"""The kept voice sessions: which record wins, for how long, and within which budget."""

import os
from pathlib import Path

from fleet.core.ids import RequestId
from fleet.history.file import DAY_US, HistoryFile
from fleet.history.sessions import KeptSession, KeptSessionFilter, KeptSessionStore
from fleet.history.store import HistoryStore, KeptAnswer

NOW_US = 1_800_000_000_000_000
MANY = 1 << 30


def session(name: str, at_us: int = NOW_US, **fields: object) -> KeptSession:
    given = {"session": name, "began_us": at_us, "seen_us": at_us, "record": b"record", **fields}
    return KeptSession(**given)  # pyright: ignore[reportArgumentType]


def names(store: KeptSessionStore, **wanted: object) -> list[str]:
    chosen = KeptSessionFilter(**wanted)  # pyright: ignore[reportArgumentType]
    return [kept.session for kept in store.newest(100, chosen)]


def test_kept_session_is_read_as_it_was_by_its_id_or_its_end(tmp_path: Path) -> None:
    store = KeptSessionStore(HistoryFile(tmp_path / "history", MANY, 14))
    assert store.read("sess_1") is None and not names(store)
    assert not (tmp_path / "history").exists()
    kept = session(
        "sess_0123456789", ended_us=NOW_US + 1, num_turns=3, key="k", why=("failed", "moved")
    )
    store.keep(kept)
    assert store.read("sess_0123456789") == store.read("23456789") == kept
    assert store.read("3456789") is None and store.read("sess_") is None


def test_later_record_replaces_an_earlier_one_and_not_the_reverse(tmp_path: Path) -> None:
    """A gateway that has lost a session may still write what it knew."""
    store = KeptSessionStore(HistoryFile(tmp_path, MANY, 14))
    store.keep(session("sess_1", seen_us=NOW_US + 20, num_turns=2, record=b"newer"))
    store.keep(session("sess_1", seen_us=NOW_US + 10, num_turns=1, record=b"older"))
    kept = store.read("sess_1")
    assert kept is not None and (kept.num_turns, kept.record) == (2, b"newer")
    store.keep(session("sess_1", seen_us=NOW_US + 30, ended_us=NOW_US + 30))
    kept = store.read("sess_1")
    assert kept is not None and kept.ended_us == NOW_US + 30


def test_list_is_filtered_and_paged(tmp_path: Path) -> None:
    store = KeptSessionStore(HistoryFile(tmp_path, MANY, 14))
    store.keep(session("sess_a", NOW_US, ended_us=NOW_US + 5, why=("failed", "dropouts")))
    store.keep(session("sess_b", NOW_US + 10, key="night"))
    store.keep(session("sess_c", NOW_US + 20, ended_us=NOW_US + 25, why=("moved",)))
    assert names(store) == ["sess_c", "sess_b", "sess_a"]
    assert names(store, state="ended") == ["sess_c", "sess_a"]
    assert names(store, state="unknown") == names(store, key="night") == ["sess_b"]
    assert names(store, why="dropouts") == ["sess_a"] and not names(store, why="drop")
    assert names(store, text="ss_c") == ["sess_c"]
    assert names(store, from_us=NOW_US + 6) == ["sess_c", "sess_b"]
    assert names(store, to_us=NOW_US + 10) == ["sess_b", "sess_a"]
    page = store.newest(2, KeptSessionFilter())
    rest = store.newest(2, KeptSessionFilter(), before_us=page[-1].began_us)
    assert [kept.session for kept in rest] == ["sess_a"]


def test_sessions_share_days_and_budget_with_answers(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path, 100_000, 2)
    sessions, answers = KeptSessionStore(file), HistoryStore(file)
    sessions.keep(session("sess_old", NOW_US - 2 * DAY_US))
    answers.keep(KeptAnswer(request=RequestId("req-1"), kept_us=NOW_US, why=("failed",)))
    sessions.keep(session("sess_first", NOW_US + 1, record=os.urandom(20_000)))
    assert names(sessions) == ["sess_first"]
    for number in range(12):
        record = os.urandom(10_000)
        sessions.keep(session(f"sess_{number}", NOW_US + 2 + number, record=record))
        assert answers.size() <= 100_000
    assert answers.read(RequestId("req-1")) is None, "the oldest goes first, whatever it is"
    assert names(sessions)[0] == "sess_11" and "sess_first" not in names(sessions)
