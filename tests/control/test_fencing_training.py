"""The right to train is one trainer's at a time, and versions of a draft head are recorded only by
that trainer and by operators.
"""

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.ids import StageName, WorkerId
from fleet.drafts.figures.training import DraftVersion, decode_version, parse_versions
from tests.control_plane import Control

ACTIVE, STANDBY = WorkerId("trainer@test:5:a"), WorkerId("trainer@test:6:b")
OPERATOR = WorkerId("")
LM = StageName("lm")


def join(control: Control, worker: WorkerId) -> str:
    call = scripts.register(
        worker, "trainer", 3_600_000_000, {"kind": "worker"}, replicas=1, standby=256
    )  # pyright: ignore
    return text(run(control.client, call))


def claim(control: Control, worker: WorkerId, newest: int = 0) -> tuple[str, int]:
    """Return the answer to a claim, and the epoch that it gave; 0 if it was refused."""
    answer, *epochs = run(control.client, scripts.claim_training(worker, newest))  # pyright: ignore
    return text(answer), int(epochs[0]) if epochs else 0


def holds(control: Control, worker: WorkerId, epoch: int) -> str:
    return text(run(control.client, scripts.holds_training(worker, epoch)))


def add(
    control: Control,
    worker: WorkerId,
    sha256: str,
    *,
    epoch: int | None = None,
    number: int = 0,
    newest: int = 0,
) -> DraftVersion | str:
    """Add a version; return it with its number, or the refusal."""
    version = DraftVersion(
        number=number,
        sha256=sha256,
        target="t",
        num_bytes=1,
        acceptance=1.2345678901234567,
        source="a run",
    )
    answer = run(control.client, scripts.add_version(worker, epoch, version, newest))
    assert isinstance(answer, bytes)
    return text(answer) if answer in (b"unlisted", b"stale") else decode_version(answer)


def numbers(control: Control) -> dict[str, int]:
    found = parse_versions(control.client.hgetall(keys.DRAFT_VERSIONS))  # pyright: ignore
    return {version.sha256: version.number for version in found}


def test_right_to_train_is_given_to_the_active_trainer_only(control: Control) -> None:
    assert (join(control, ACTIVE), join(control, STANDBY)) == ("ok", "standby")
    assert claim(control, STANDBY) == ("unlisted", 0)
    answer, epoch = claim(control, ACTIVE)
    assert answer == "ok" and holds(control, ACTIVE, epoch) == "ok"
    assert holds(control, STANDBY, epoch) == "unlisted"
    control.kill(ACTIVE)
    assert holds(control, ACTIVE, epoch) == "unlisted" and claim(control, ACTIVE)[0] == "unlisted"
    answer, higher = claim(control, STANDBY)
    assert answer == "ok" and higher > epoch, "it was promoted"
    assert (holds(control, STANDBY, higher), holds(control, STANDBY, epoch)) == ("ok", "stale")


def test_right_to_train_is_above_every_epoch_in_the_folder(control: Control) -> None:
    """The folder may know epochs that Redis has lost, and that a clock set back does not reach."""
    join(control, ACTIVE)
    far = 8_000_000_000_000_000
    _, first = claim(control, ACTIVE, far)
    control.client.hdel(keys.TRAINING, "trainer", "epoch")
    assert holds(control, ACTIVE, first) == "stale"
    _, second = claim(control, ACTIVE, first)
    assert far < first < second


def test_right_to_train_stays_with_a_trainer_that_finishes_its_tasks(control: Control) -> None:
    join(control, ACTIVE)
    _, epoch = claim(control, ACTIVE)
    control.client.sadd(keys.worker_tasks(ACTIVE), "req-1|trainer")
    run(control.client, scripts.drain(ACTIVE))
    assert join(control, STANDBY) == "ok" and claim(control, STANDBY) == ("held", 0)
    assert holds(control, ACTIVE, epoch) == "ok"
    control.client.delete(keys.worker_tasks(ACTIVE))
    assert claim(control, STANDBY)[0] == "ok" and holds(control, ACTIVE, epoch) == "stale"


def test_version_is_added_by_the_active_trainer_or_an_operator_and_once(control: Control) -> None:
    assert (join(control, ACTIVE), join(control, STANDBY)) == ("ok", "standby")
    _, epoch = claim(control, ACTIVE)
    assert add(control, STANDBY, "aa", epoch=epoch) == "unlisted"
    assert add(control, ACTIVE, "aa", epoch=epoch - 1) == "stale"
    first, second = add(control, ACTIVE, "aa", epoch=epoch), add(control, OPERATOR, "bb")
    assert isinstance(first, DraftVersion) and isinstance(second, DraftVersion)
    assert (first.number, second.number) == (1, 2)
    assert first.acceptance == 1.2345678901234567, "the number changes no other field"
    assert add(control, OPERATOR, "aa") == first
    control.kill(ACTIVE)
    assert add(control, ACTIVE, "cc", epoch=epoch) == "unlisted"
    assert numbers(control) == {"aa": 1, "bb": 2}


def test_number_of_a_version_that_redis_lost_is_not_given_again(control: Control) -> None:
    """A version that is in the folder keeps its number; a new one gets a number above all that the
    folder knows.
    """
    assert isinstance(add(control, OPERATOR, "dd", newest=3), DraftVersion)
    assert numbers(control) == {"dd": 4}
    for sha256, number in (("aa", 1), ("cc", 3), ("ee", 4)):
        add(control, OPERATOR, sha256, number=number, newest=4)
    assert numbers(control) == {"aa": 1, "cc": 3, "dd": 4, "ee": 5}, "4 is the number of dd"


def test_version_in_use_is_changed_by_listed_workers_that_know_the_present_one(
    control: Control,
) -> None:
    def promote(worker: WorkerId, expected: str, sha256: str, epoch: int | None = None) -> str:
        call = scripts.promote_version(worker, epoch, LM, expected, sha256, "a test")
        return text(run(control.client, call))

    def in_use() -> tuple[str, str]:
        found = control.client.hmget(keys.DRAFTERS, "lm:version", "lm:last_version")
        return text(found[0]), text(found[1])  # pyright: ignore

    assert (join(control, ACTIVE), join(control, STANDBY)) == ("ok", "standby")
    _, epoch = claim(control, ACTIVE)
    for sha256 in ("aa", "bb"):
        add(control, OPERATOR, sha256)
    assert promote(OPERATOR, scripts.ANY_VERSION, "cc") == "unknown"
    assert promote(OPERATOR, scripts.ANY_VERSION, "aa") == "ok" and in_use() == ("aa", "")
    assert (promote(STANDBY, "aa", "bb"), promote(ACTIVE, "", "bb")) == ("unlisted", "stale")
    assert promote(ACTIVE, "aa", "bb", epoch - 1) == "stale" and in_use() == ("aa", "")
    assert promote(ACTIVE, "aa", "bb", epoch) == "ok" and in_use() == ("bb", "aa")
    assert text(control.client.hget(keys.DRAFT_VERSIONS, "note:bb")) == "a test"
    control.kill(ACTIVE)
    assert promote(ACTIVE, "bb", "") == "unlisted" and in_use() == ("bb", "aa")
    assert promote(OPERATOR, scripts.ANY_VERSION, "") == "ok" and in_use() == ("", "bb")


def test_version_is_forgotten_unless_it_is_in_use_or_was_before(control: Control) -> None:
    join(control, ACTIVE)
    _, epoch = claim(control, ACTIVE)
    for sha256 in ("aa", "bb", "cc"):
        add(control, OPERATOR, sha256)
    for sha256 in ("aa", "bb"):
        run(
            control.client,
            scripts.promote_version(OPERATOR, None, LM, scripts.ANY_VERSION, sha256, "a test"),
        )

    def forget(sha256: str, at: int = epoch) -> str:
        return text(run(control.client, scripts.forget_version(ACTIVE, at, sha256)))

    assert (forget("aa"), forget("bb"), forget("cc", epoch - 1)) == ("in_use", "in_use", "stale")
    assert forget("cc") == "ok" and numbers(control) == {"aa": 1, "bb": 2}
    assert forget("cc") == "ok", "it is forgotten once, however often it is ordered"
    dd = add(control, OPERATOR, "dd")
    assert isinstance(dd, DraftVersion) and dd.number == 4, "no number is given twice"
