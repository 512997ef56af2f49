"""Checkpoints and versions of a draft head can be recorded only by the active trainer and by
operators.
"""

import redis

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.ids import StageName, WorkerId
from fleet.drafts.figures.training import DraftVersion, decode_version, encode_version
from tests.control_plane import Control

ACTIVE, STANDBY = WorkerId("trainer@test:5:a"), WorkerId("trainer@test:6:b")
OPERATOR = WorkerId("")


def join(control: Control, worker: WorkerId) -> str:
    call = scripts.register(
        worker, "trainer", 3_600_000_000, {"kind": "worker"}, replicas=1, standby=256
    )  # pyright: ignore
    return text(run(control.client, call))


def add(control: Control, worker: WorkerId, sha256: str) -> DraftVersion | None:
    version = DraftVersion(
        number=0,
        sha256=sha256,
        target="t",
        num_bytes=1,
        acceptance=1.2345678901234567,
        source="a run",
    )
    answer = run(control.client, scripts.add_version(worker, sha256, encode_version(version)))
    assert isinstance(answer, bytes)
    return None if answer == b"unlisted" else decode_version(answer)


def checkpoint(client: redis.Redis) -> str:
    return text(client.hget(keys.TRAINING, "checkpoint"))


def test_checkpoint_is_recorded_by_the_active_trainer_only(control: Control) -> None:
    assert (join(control, ACTIVE), join(control, STANDBY)) == ("ok", "standby")
    assert text(run(control.client, scripts.note_checkpoint(STANDBY, "early"))) == "unlisted"
    assert (
        text(run(control.client, scripts.note_checkpoint(ACTIVE, "first"))) == "ok"
        and checkpoint(control.client) == "first"
    )
    control.kill(ACTIVE)
    assert text(run(control.client, scripts.note_checkpoint(STANDBY, "second"))) == "ok", (
        "it was promoted"
    )
    assert text(run(control.client, scripts.note_checkpoint(ACTIVE, "late"))) == "unlisted"
    assert checkpoint(control.client) == "second"


def test_version_is_added_by_the_active_trainer_or_an_operator_and_once(control: Control) -> None:
    assert (join(control, ACTIVE), join(control, STANDBY)) == ("ok", "standby")
    assert add(control, STANDBY, "aa") is None
    first, second = add(control, ACTIVE, "aa"), add(control, OPERATOR, "bb")
    assert first is not None and second is not None and (first.number, second.number) == (1, 2)
    assert first.acceptance == 1.2345678901234567, "the number changes no other field"
    assert add(control, OPERATOR, "aa") == first
    control.kill(ACTIVE)
    assert add(control, ACTIVE, "cc") is None
    assert {field for field in control.client.hkeys(keys.DRAFT_VERSIONS) if field.isdigit()} == {
        b"1",
        b"2",
    }


def test_version_in_use_is_changed_by_listed_workers_that_know_the_present_one(
    control: Control,
) -> None:
    def promote(worker: WorkerId, expected: int | None, number: int) -> str:
        call = scripts.promote_version(worker, StageName("lm"), expected, number, "a test")
        return text(run(control.client, call))

    def in_use() -> tuple[str, str]:
        found = control.client.hmget(keys.DRAFTERS, "lm:version", "lm:last_version")
        return text(found[0]), text(found[1])  # pyright: ignore

    assert (join(control, ACTIVE), join(control, STANDBY)) == ("ok", "standby")
    for sha256 in ("aa", "bb"):
        add(control, OPERATOR, sha256)
    assert promote(OPERATOR, None, 3) == "unknown"
    assert promote(OPERATOR, None, 1) == "ok" and in_use() == ("1", "0")
    assert (promote(STANDBY, 1, 2), promote(ACTIVE, 0, 2)) == (
        "unlisted",
        "stale",
    ) and in_use() == ("1", "0")
    assert promote(ACTIVE, 1, 2) == "ok" and in_use() == ("2", "1")
    assert text(control.client.hget(keys.DRAFT_VERSIONS, "note:2")) == "a test"
    control.kill(ACTIVE)
    assert promote(ACTIVE, 2, 0) == "unlisted" and in_use() == ("2", "1")
    assert promote(OPERATOR, None, 0) == "ok" and in_use() == ("0", "2")
