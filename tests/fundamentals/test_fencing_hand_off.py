"""Fencing around a hand-off: a former owner writes nothing more, and offered blocks are either
imported or withdrawn.
"""

from fleet.control import keys, scripts
from fleet.core.events import TaskLost
from fleet.core.ids import CLIENT, Epoch
from tests.fundamentals.control_plane import OTHER, REQUEST, ROLE, STAGE, WORKER, Control
from tests.support import stream_entries


def test_task_is_handed_off_once_and_by_its_owner(control: Control) -> None:
    """The former owner writes nothing more; the offer is then confirmed or released, never both."""

    def hand_off(epoch: Epoch) -> str:
        return control.run(
            scripts.hand_off(REQUEST, STAGE, epoch, WORKER, ROLE, num_rows=3, data=b"blocks")
        )

    def offer() -> Epoch:
        old = control.own()
        assert hand_off(old) == "ok"
        assert [hand_off(old), control.append(old)] == ["stale", "stale"]
        new = control.epoch()
        control.register(OTHER)
        assert control.claim(new, OTHER) == "ok"
        assert control.run(scripts.confirm(REQUEST, STAGE, old)) == "stale"
        assert control.run(scripts.release(REQUEST, STAGE, OTHER)) == "stale"
        return new

    first = offer()
    assert control.run(scripts.confirm(REQUEST, STAGE, first)) == "ok"
    assert control.run(scripts.release(REQUEST, STAGE, WORKER)) == "stale"
    control.kill(OTHER)
    second = offer()
    assert control.run(scripts.release(REQUEST, STAGE, WORKER)) == "ok"
    assert control.run(scripts.confirm(REQUEST, STAGE, second)) == "released"
    control.kill(OTHER)
    third = offer()
    control.kill(WORKER)
    assert control.run(scripts.confirm(REQUEST, STAGE, third)) == "released", (
        "its source reuses the blocks"
    )
    control.abort()
    assert hand_off(control.epoch()) == "ended"
    assert control.run(scripts.confirm(REQUEST, STAGE, control.epoch())) == "ended"
    assert control.client.exists(keys.kv(REQUEST, STAGE)) == 0


def test_lost_tensors_that_the_owner_skips_revoke_its_task(control: Control) -> None:
    """The owner imported the blocks of the worker that published the chunks; after the next grant
    the task recomputes them, and keeps its owner.
    """
    client = control.epoch(CLIENT)

    def lose() -> str:
        return control.run(scripts.lose_tensors(REQUEST, CLIENT, client, STAGE))

    old = control.own()
    assert (
        control.run(scripts.hand_off(REQUEST, STAGE, old, WORKER, ROLE, num_rows=3, data=b"blocks"))
        == "ok"
    )
    control.register(OTHER)
    importer = control.epoch()
    assert control.claim(importer, OTHER) == "ok"
    assert (lose(), control.epoch()) == ("ok", importer), (
        "the owner can still compute them: it has not imported the blocks"
    )
    assert control.run(scripts.confirm(REQUEST, STAGE, importer)) == "ok"
    assert (lose(), control.task()["state"], control.append(importer)) == ("ok", "granted", "stale")
    (lost,) = control.events_of(TaskLost)
    assert lost.epoch < control.epoch() and (lost.deaths, lost.alone) == (0, False)
    entries = stream_entries(control.client, keys.inbox(OTHER))
    assert [fields[b"k"] for _, fields in entries] == [b"x"], (
        "the owner is notified to drop the task"
    )
    again = control.own(OTHER)
    assert (lose(), control.epoch(), control.task()["owner"]) == ("ok", again, OTHER)


def test_task_metadata_is_written_only_by_its_owner(control: Control) -> None:
    def write_metadata(epoch: Epoch, line: bytes) -> str:
        return control.run(scripts.set_task_metadata(REQUEST, STAGE, epoch, "news", line))

    old = control.own()
    assert write_metadata(old, b"true") == "ok"
    control.kill()
    assert write_metadata(old, b"late") == "stale"
    assert control.task()["meta:news"] == "true"
    control.abort()
    assert write_metadata(old, b"late") == "stale"
    assert control.client.ttl(keys.task(REQUEST, STAGE)) > 0
