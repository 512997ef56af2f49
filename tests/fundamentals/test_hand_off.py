"""Hand-off: a split stage passes a task with its KV blocks from one role to the other. The owner
offers the blocks once; the next owner confirms the import, or the source withdraws the offer.
"""

from fleet.control import keys, scripts
from fleet.core.events import TaskHandedOff, TaskLost
from fleet.core.ids import Epoch, WorkerId
from tests.control_plane import HALVES, OTHER, REQUEST, STAGE, TEXT, WORKER, Control


def confirm(control: Control, epoch: Epoch) -> str:
    return control.run(scripts.confirm(REQUEST, STAGE, epoch))


def release(control: Control, worker: WorkerId) -> str:
    return control.run(scripts.release(REQUEST, STAGE, worker))


def test_blocks_are_offered_once_and_then_confirmed_or_withdrawn(control: Control) -> None:
    def offer() -> Epoch:
        old = control.own()
        assert control.hand_off(old) == "ok"
        assert [control.hand_off(old), control.append(old)] == ["stale", "stale"]
        control.register(OTHER)
        assert control.claim(worker=OTHER) == "ok"
        assert [confirm(control, old), release(control, OTHER)] == ["stale", "stale"]
        return control.epoch()

    confirmed = offer()
    assert [confirm(control, confirmed), release(control, WORKER)] == ["ok", "stale"]
    control.kill(OTHER)
    withdrawn = offer()
    assert [release(control, WORKER), confirm(control, withdrawn)] == ["ok", "released"]
    control.kill(OTHER)
    lost = offer()
    control.kill(WORKER)
    assert confirm(control, lost) == "released", "the source reuses the blocks"
    control.abort()
    assert not control.client.exists(keys.kv(REQUEST, STAGE))


def test_lost_task_is_granted_to_its_last_role(control: Control) -> None:
    decode = HALVES[1]
    assert control.hand_off(control.own(), decode) == "ok"
    (handed_off,) = control.events_of(TaskHandedOff)
    assert control.grants(decode) == [(STAGE, handed_off.epoch, False)]
    control.register(OTHER, decode)
    assert control.claim(worker=OTHER) == "ok"
    control.kill(OTHER)
    assert control.epoch() > handed_off.epoch
    assert (STAGE, control.epoch(), False) in control.grants(decode)


def test_hand_off_that_overtakes_a_refused_append_waits_for_it(control: Control) -> None:
    """A hand-off that overtakes a refused append is refused too, until the chunk is appended:
    memory may have been freed between the two calls, so that Redis would accept the second one.
    """
    epoch = control.own()
    assert control.hand_off(epoch, produced={TEXT: 1}) == "behind" and control.epoch() == epoch
    assert control.append(epoch) == "ok"
    assert control.hand_off(epoch, produced={TEXT: 1}) == "ok" and control.epoch() > epoch


def test_lost_tensors_that_the_new_owner_skips_revoke_its_task(control: Control) -> None:
    """An owner that imported KV blocks does not compute the chunks published before. If the tensors
    of such chunks are lost, its task is revoked, and the next owner computes them.
    """
    assert control.hand_off(control.own()) == "ok"
    control.register(OTHER)
    assert control.claim(worker=OTHER) == "ok"
    importer = control.epoch()
    assert (control.lose_tensors(), control.epoch()) == ("ok", importer), "nothing is imported yet"
    assert confirm(control, importer) == "ok"
    assert [control.lose_tensors(), control.append(importer)] == ["ok", "stale"]
    (lost,) = control.events_of(TaskLost)
    assert lost.epoch < control.epoch() and (lost.deaths, lost.alone) == (0, False)
    assert [notice[b"k"] for notice in control.inbox(OTHER)] == [b"x"], "drop the task"
    again = control.own(OTHER)
    assert (control.lose_tensors(), control.epoch()) == ("ok", again)
    assert control.task()["owner"] == OTHER
