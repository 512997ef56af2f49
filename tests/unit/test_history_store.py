"""The file of kept answers: what is kept, for how long, and within which budget."""

import os
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest

from fleet.core.ids import RequestId
from fleet.history.file import DAY_US, FILE, HistoryFile
from fleet.history.incidents import KeptIncident, KeptIncidentStore
from fleet.history.store import HistoryStore, KeptAnswer

NOW_US = 1_800_000_000_000_000
MANY = 1 << 30


def answer(
    name: str, *why: str, at_us: int = NOW_US, pinned: bool = False, record: bytes = b"record"
) -> KeptAnswer:
    return KeptAnswer(
        request=RequestId(name),
        kept_us=at_us,
        why=why or ("failed",),
        pinned=pinned,
        record=record,
        sound=b"fLaC",
    )


def names(store: HistoryStore) -> list[str]:
    return [kept.request for kept in store.newest(100)]


def test_kept_answer_is_read_as_it_was(tmp_path: Path) -> None:
    store = HistoryStore(HistoryFile(tmp_path / "history", MANY, 14))
    store.keep(answer("req-1", "failed", "interrupted", record=b"r" * 10_000))
    assert HistoryStore(HistoryFile(tmp_path / "history", MANY, 14)).read(
        RequestId("req-1")
    ) == answer("req-1", "failed", "interrupted", record=b"r" * 10_000)
    assert store.read(RequestId("req-2")) is None
    assert 0 < store.size() < 1000, "records are compressed"


def test_nothing_is_made_before_the_first_answer(tmp_path: Path) -> None:
    store = HistoryStore(HistoryFile(tmp_path / "history", MANY, 14))
    assert store.read(RequestId("req-1")) is None and not store.newest(5) and store.size() == 0
    assert not store.pin(RequestId("req-1"), pinned=True)
    assert not (tmp_path / "history").exists()
    store.keep(answer("req-1"))
    for path in (tmp_path / "history", tmp_path / "history" / FILE):
        assert path.stat().st_mode & 0o077 == 0


def test_answer_kept_twice_has_both_reasons_and_the_newer_record(tmp_path: Path) -> None:
    store = HistoryStore(HistoryFile(tmp_path, MANY, 14))
    store.keep(answer("req-1", "slow", pinned=True))
    newer = answer("req-1", "dropouts", "slow", record=b"newer")
    store.keep(msgspec.structs.replace(newer, sound=b""))
    kept = store.read(RequestId("req-1"))
    assert kept is not None and kept.why == ("slow", "dropouts")
    assert kept.record == b"newer" and kept.pinned and kept.sound == b"fLaC"


def test_answers_are_removed_after_their_days_unless_pinned(tmp_path: Path) -> None:
    store = HistoryStore(HistoryFile(tmp_path, MANY, 2))
    store.keep(answer("old"))
    store.keep(answer("pinned", pinned=True))
    store.keep(answer("new", at_us=NOW_US + 2 * DAY_US))
    assert set(names(store)) == {"new", "pinned", "old"}
    store.keep(answer("newest", at_us=NOW_US + 2 * DAY_US + 1))
    assert set(names(store)) == {"newest", "new", "pinned"}
    assert store.pin(RequestId("pinned"), pinned=False)
    store.keep(answer("last", at_us=NOW_US + 2 * DAY_US + 2))
    assert set(names(store)) == {"last", "newest", "new"}


def test_budget_removes_the_oldest_and_pinned_ones_last(tmp_path: Path) -> None:
    budget = 100_000
    store = HistoryStore(HistoryFile(tmp_path, budget, 14))
    store.keep(answer("pinned", pinned=True, record=os.urandom(20_000)))
    for number in range(40):
        store.keep(answer(f"req-{number}", at_us=NOW_US + number, record=os.urandom(10_000)))
        assert store.size() <= budget
    assert names(store)[0] == "req-39" and "pinned" in names(store) and "req-0" not in names(store)
    for number in range(8):
        store.keep(
            answer(f"pin-{number}", pinned=True, at_us=NOW_US + 99, record=os.urandom(20_000))
        )
    assert store.size() <= budget and "pinned" not in names(store)


def test_list_is_filtered_by_reason_and_paged_by_time(tmp_path: Path) -> None:
    store = HistoryStore(HistoryFile(tmp_path, MANY, 14))
    for number in range(6):
        why = ("slow",) if number % 2 else ("failed", "interrupted")
        store.keep(answer(f"req-{number}", *why, at_us=NOW_US + number))
    page = store.newest(2, why="interrupted")
    assert [kept.request for kept in page] == ["req-4", "req-2"]
    rest = store.newest(2, why="interrupted", before_us=page[-1].kept_us)
    assert [kept.request for kept in rest] == ["req-0"]
    assert not store.newest(5, why="interrupt")


def test_several_writers_share_the_file(tmp_path: Path) -> None:
    stores = [HistoryStore(HistoryFile(tmp_path, MANY, 14)) for _ in range(4)]

    def write(store: HistoryStore, reason: str) -> None:
        for number in range(20):
            store.keep(answer(f"req-{number}", reason))

    reasons = ("failed", "slow", "dropouts", "interrupted")
    threads = [
        threading.Thread(target=write, args=pair) for pair in zip(stores, reasons, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(kept.why) for kept in stores[0].newest(100)] == [set(reasons)] * 20


def test_writer_waits_for_whoever_creates_the_tables(tmp_path: Path) -> None:
    first = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    first.execute("BEGIN IMMEDIATE")
    store = HistoryStore(HistoryFile(tmp_path, MANY, 14))
    second = threading.Thread(target=store.keep, args=(answer("req-1"),))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    first.execute("COMMIT")
    second.join()
    first.close()
    assert names(store) == ["req-1"]


def test_damaged_file_is_an_error_of_sqlite(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(sqlite3.Error):
        HistoryStore(HistoryFile(tmp_path, MANY, 14)).keep(answer("req-1"))


def incident(number: int, record: bytes = b"record") -> KeptIncident:
    begin_us = NOW_US + number
    return KeptIncident(id=f"{number}", begin_us=begin_us, summary=b"summary", record=record)


def incident_ids(store: KeptIncidentStore) -> list[str]:
    return [kept.id for kept in store.newest(100)]


def test_kept_incident_is_read_as_it_was_and_replaced_as_it_goes_on(tmp_path: Path) -> None:
    store = KeptIncidentStore(HistoryFile(tmp_path, MANY, 14))
    assert store.read("1") is None and not store.newest(5)
    store.keep(incident(1), NOW_US)
    store.keep(incident(1, b"longer" * 1000), NOW_US)
    store.keep(incident(2), NOW_US)
    assert KeptIncidentStore(HistoryFile(tmp_path, MANY, 14)).read("1") == incident(
        1, b"longer" * 1000
    )
    assert incident_ids(store) == ["2", "1"]
    assert [kept.id for kept in store.newest(5, before_us=NOW_US + 2)] == ["1"]
    assert 0 < HistoryStore(HistoryFile(tmp_path, MANY, 14)).size() < 1000, "records are compressed"


def test_incidents_leave_after_their_days_and_the_oldest_beyond_their_share(tmp_path: Path) -> None:
    noise = os.urandom(10_000)
    answers = HistoryStore(HistoryFile(tmp_path, 240_000, 14))
    store = KeptIncidentStore(HistoryFile(tmp_path, 240_000, 14))
    answers.keep(answer("req-1", record=os.urandom(200_000)))
    for number in range(4):
        store.keep(incident(number, noise), NOW_US)
    assert incident_ids(store) == ["3", "2"], "an eighth of the budget is 30 kB"
    assert names(answers) == ["req-1"]
    store.keep(incident(15 * DAY_US), NOW_US + 15 * DAY_US)
    assert incident_ids(store) == [str(15 * DAY_US)]


def test_incidents_count_in_the_budget_of_answers(tmp_path: Path) -> None:
    answers = HistoryStore(HistoryFile(tmp_path, 240_000, 14))
    store = KeptIncidentStore(HistoryFile(tmp_path, 240_000, 14))
    answers.keep(answer("req-1", record=os.urandom(230_000)))
    store.keep(incident(1, os.urandom(20_000)), NOW_US)
    assert answers.size() < 240_000 and not names(answers) and incident_ids(store) == ["1"]
