"""Fencing: the former holder of a right can no longer write. Scripts compare the epoch, lease or
lead of the caller, and a refused call changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import run
from fleet.core.events import TaskFailed
from fleet.core.ids import CLIENT, Epoch, RequestId, Walk, WorkerId
from fleet.drafts.figures.training import DraftVersion
from tests.control_plane import (
    CONDUCTOR,
    GATEWAY,
    OTHER,
    OTHER_GATEWAY,
    REQUEST,
    ROLE,
    STAGE,
    TEXT,
    WORKER,
    Control,
)

HEAD = DraftVersion(number=0, sha256="aa", target="t", num_bytes=1)
Call = Callable[[Control, Epoch], scripts.Call | str]
"""Function that calls a script with a former right (an epoch, for example); it returns the call to
make, or the answer.
"""


@dataclass(frozen=True, slots=True)
class LostRight:
    """A way to lose a right (`begin`), and the expected answer of each script to the former holder
    (`calls`).
    """

    begin: Callable[[Control], Epoch]
    calls: dict[str, tuple[Call, str]]


def lose_task(control: Control) -> Epoch:
    """Let the task's owner be fenced and another worker claim the task; return the former owner's
    epoch.
    """
    old = control.own()
    assert [control.append(old), control.relocate(old, WORKER)] == ["ok", "ok"]
    assert control.run(scripts.set_task_metadata(REQUEST, STAGE, old, "news", b"true")) == "ok"
    control.kill()
    control.register(OTHER)
    assert control.claim(worker=OTHER) == "ok"
    return old


def lose_client(control: Control) -> Epoch:
    """Attach the request to another gateway; return the former gateway's epoch."""
    old = control.epoch(CLIENT)
    assert control.append(control.own(), finish=True) == "ok"
    control.register(OTHER_GATEWAY, "")
    assert control.attach(OTHER_GATEWAY) == "ok"
    return old


def lose_lease(control: Control) -> Epoch:
    control.kill(GATEWAY)
    control.kill()
    return Epoch(0)


def lose_lead(control: Control) -> Epoch:
    """Depose the leader, which then continues to call scripts with its former token."""
    control.client.zadd(keys.RETAINED_AUDIO, {"req-ended|": 1})
    control.leader = control.depose()
    return control.epoch()


def end(control: Control) -> Epoch:
    """Abort the request while its task is granted; return the epoch of the grant."""
    assert control.abort() == "ok"
    return control.epoch()


def lose_voice(control: Control) -> Epoch:
    """Let another gateway hold the voice session; return the former holder's epoch."""
    control.register(OTHER_GATEWAY, "")
    assert control.run(hold_voice(GATEWAY, new=True)) != "full"
    old = Epoch(int(control.client.hget(keys.voice("talk"), "epoch") or 0))
    assert control.run(hold_voice(OTHER_GATEWAY)) != "full"
    return old


def hold_voice(holder: WorkerId, name: str = "talk", *, new: bool = False) -> scripts.Call:
    return scripts.hold_voice(name, holder, 60_000, "/1", new=new, bound=1)


def lose_training(control: Control) -> Epoch:
    """Let another trainer claim the right to train; return the former holder's epoch."""
    control.register(OTHER)
    old = claim_training(control, WORKER)
    assert claim_training(control, OTHER) > old
    return old


def claim_training(control: Control, worker: WorkerId) -> Epoch:
    answer = cast("list[bytes]", run(control.client, scripts.claim_training(worker, 0)))
    return Epoch(int(answer[1]))


def failed(epoch: Epoch) -> scripts.Call:
    event = TaskFailed(request=REQUEST, stage=STAGE, epoch=epoch, code="engine_error", message="no")
    return scripts.fail(event)


def cache_prefix(epoch: Epoch) -> scripts.Call:
    return scripts.cache_prefix(
        REQUEST, STAGE, epoch, WORKER, "talk", num_rows=3, reused=2, keep_s=60
    )


WRITES_OF_A_TASK: dict[str, Call] = {
    "append": lambda control, old: control.append(old, 1),
    "append the last chunk": lambda control, old: control.append(old, 1, finish=True),
    "relocate": lambda control, old: control.relocate(old, OTHER),
    "hand_off": lambda control, old: control.hand_off(old),
    "confirm": lambda _, old: scripts.confirm(REQUEST, STAGE, old),
    "decline": lambda _, old: scripts.decline(REQUEST, STAGE, old),
    "report_idle": lambda _, old: scripts.report_idle(REQUEST, STAGE, old, {TEXT: 1}),
    "park": lambda _, old: scripts.park(REQUEST, STAGE, old, [scripts.CreditWait(TEXT, CLIENT, 9)]),
    "park_starved": lambda _, old: scripts.park_starved(REQUEST, STAGE, old, [(TEXT, STAGE, 9)]),
    "lose_tasks": lambda control, old: control.lose_task(old),
    "suspect_task": lambda _, old: scripts.suspect_task(REQUEST, STAGE, old),
    "fail": lambda _, old: failed(old),
    "cache_prefix": lambda _, old: cache_prefix(old),
}

LOST_RIGHTS = {
    "another worker has the task": LostRight(
        lose_task,
        {name: (call, "stale") for name, call in WRITES_OF_A_TASK.items()}
        | {
            "set_task_metadata": (
                lambda _, old: scripts.set_task_metadata(REQUEST, STAGE, old, "news", b"late"),
                "stale",
            ),
            "claim": (lambda control, old: control.claim(old, OTHER), "stale"),
            "redeliver": (lambda control, old: control.redeliver(old), "stale"),
            "release": (lambda _, __: scripts.release(REQUEST, STAGE, WORKER), "stale"),
            "reserve": (
                lambda _, old: scripts.reserve(OTHER, ROLE, "", REQUEST, STAGE, old),
                "stale",
            ),
        },
    ),
    "the leases have lapsed": LostRight(
        lose_lease,
        {
            "renew": (lambda control, _: control.renew(), "unlisted"),
            "drain": (lambda control, _: control.drain(), "unlisted"),
            "order": (lambda control, _: control.order("drain"), "gone"),
            "claim": (
                lambda control, _: scripts.claim(WORKER, ROLE, "", REQUEST, STAGE, control.epoch()),
                "unlisted",
            ),
            "read_grants": (lambda _, __: scripts.read_grants(WORKER, ROLE, 1), "unlisted"),
            "adopt_prefix": (
                lambda _, __: scripts.adopt_prefix(WORKER, STAGE, "talk", keep_s=60),
                "stale",
            ),
            "set_route": (lambda _, __: scripts.set_route(WORKER, []), "stale"),
            "note_gap": (lambda _, __: scripts.note_gap(WORKER, "layer 2"), "unlisted"),
            "note_standby": (lambda _, __: scripts.note_standby(WORKER, OTHER, "1:1"), "unlisted"),
            "claim_training": (lambda _, __: scripts.claim_training(WORKER, 0), "unlisted"),
            "add_version": (lambda _, __: scripts.add_version(WORKER, 1, HEAD), "unlisted"),
            "forget_version": (lambda _, __: scripts.forget_version(WORKER, 1, "aa"), "unlisted"),
            "promote_version": (
                lambda _, __: scripts.promote_version(
                    WORKER, None, STAGE, scripts.ANY_VERSION, "", "why"
                ),
                "unlisted",
            ),
            "submit": (lambda control, _: control.submit()[0], "stale"),
            "restore": (lambda control, _: control.restore()[0], "unlisted"),
            "attach": (lambda control, _: control.attach(GATEWAY), "unlisted"),
        },
    ),
    "another gateway has the client": LostRight(
        lose_client,
        {
            "ack": (lambda control, old: control.acknowledge(epoch=old), "stale"),
            "abort": (lambda control, old: control.abort(right=old), "stale"),
            "detach": (lambda control, old: control.detach(GATEWAY, old), "stale"),
            "detach the other gateway": (
                lambda control, _: control.detach(GATEWAY, control.epoch(CLIENT)),
                "stale",
            ),
            "attach": (lambda control, old: control.attach(GATEWAY, held=old), "stale"),
            "lose_tensors": (lambda control, old: control.lose_tensors(old), "stale"),
        },
    ),
    "another conductor leads": LostRight(
        lose_lead,
        {
            "overdue": (lambda control, _: control.watch(), "not_leader"),
            "abandon": (lambda control, _: scripts.abandon(control.leader, 0), "not_leader"),
            "restart_waits": (
                lambda control, _: scripts.restart_waits(control.leader),
                "not_leader",
            ),
            "set_walk": (
                lambda control, _: scripts.set_walk(
                    control.leader, "1-0", REQUEST, STAGE, TEXT, 0, Walk("decode")
                ),
                "not_leader",
            ),
            "fence_worker": (lambda control, _: control.fence(), "not_leader"),
            "fence_tasks": (
                lambda control, _: scripts.fence_tasks(control.leader, WORKER),
                "not_leader",
            ),
            "sweep": (lambda control, _: scripts.sweep(control.leader), "not_leader"),
            "lead": (lambda control, _: scripts.lead(CONDUCTOR, control.leader, 60_000), ""),
        },
    ),
    "the request has ended": LostRight(
        end,
        {
            name: (call, "ended")
            for name, call in WRITES_OF_A_TASK.items()
            if name not in ("report_idle", "fail", "append the last chunk")
        }
        | {
            "set_walk": (
                lambda control, _: scripts.set_walk(
                    control.leader, "1-0", REQUEST, STAGE, TEXT, 0, Walk("decode")
                ),
                "ended",
            ),
            "ack": (lambda control, _: control.acknowledge(), "ended"),
            "abort": (lambda control, _: control.abort(), "ended"),
            "attach": (lambda control, _: control.attach(GATEWAY), "ended"),
            "detach": (
                lambda control, _: control.detach(GATEWAY, control.epoch(CLIENT)),
                "ended",
            ),
            "lose_tensors": (lambda control, _: control.lose_tensors(), "ended"),
            "redeliver": (lambda control, _: control.redeliver(), "ended"),
        },
    ),
    "another worker has the right to train": LostRight(
        lose_training,
        {
            "holds_training": (lambda _, old: scripts.holds_training(WORKER, old), "stale"),
            "add_version": (lambda _, old: scripts.add_version(WORKER, old, HEAD), "stale"),
            "forget_version": (lambda _, old: scripts.forget_version(WORKER, old, "aa"), "stale"),
            "promote_version": (
                lambda _, old: scripts.promote_version(
                    WORKER, old, STAGE, scripts.ANY_VERSION, "", "why"
                ),
                "stale",
            ),
        },
    ),
    "another gateway has the voice session": LostRight(
        lose_voice,
        {
            "save_voice": (
                lambda _, old: scripts.save_voice("talk", old, 60_000, "/1", {}, ()),
                "stale",
            ),
            "end_voice": (lambda _, old: scripts.end_voice("talk", old), "stale"),
            "hold_voice": (lambda _, __: hold_voice(GATEWAY, "other", new=True), "full"),
        },
    ),
    "unknown names": LostRight(
        lambda control: control.epoch(),
        {
            "register": (lambda control, _: control.register(WORKER), "exists"),
            "order": (lambda control, _: control.order("drain", OTHER), "unlisted"),
            "order a gateway": (lambda control, _: control.order("drain", GATEWAY), "gateway"),
            "attach": (lambda control, _: control.attach(OTHER_GATEWAY), "unlisted"),
            "redeliver": (
                lambda control, _: control.redeliver(request=RequestId("req-2")),
                "unknown",
            ),
            "record_playback": (
                lambda _, __: scripts.record_playback(RequestId("req-2"), 10, 1),
                "unknown",
            ),
            "note_request": (
                lambda _, __: scripts.note_request(RequestId("req-2"), "turn", "10,11"),
                "unknown",
            ),
            "claim_export": (
                lambda _, __: scripts.claim_export(RequestId("req-2"), GATEWAY),
                "unknown",
            ),
            "end_start": (lambda _, __: scripts.end_start(ROLE, "test:9"), "unknown"),
            "forget_response": (lambda _, __: scripts.forget_response("resp_2", "a"), "unknown"),
            "scale": (lambda _, __: scripts.scale(ROLE, 3, "a"), "unmanaged"),
        },
    ),
}
READ_ONLY = {"admission", "availability", "backlog", "leases", "queues", "stale_streams"}
NEEDS_NO_RIGHT = {
    "announce_start",
    "assume_served",
    "log_fact",
    "record_metrics",
    "save_response",
    "share_workers",
    "take_turns",
}


@pytest.mark.parametrize(
    ("lost", "call"), [(lost, call) for lost in LOST_RIGHTS for call in LOST_RIGHTS[lost].calls]
)
def test_former_right_is_refused_and_changes_nothing(
    control: Control, lost: str, call: str
) -> None:
    right = LOST_RIGHTS[lost].begin(control)
    before = contents(control.client)
    write, expected = LOST_RIGHTS[lost].calls[call]
    answer = write(control, right)
    assert (answer if isinstance(answer, str) else control.run(answer)) == expected
    assert contents(control.client) == before


def contents(client: redis.Redis) -> dict[object, object]:
    """Return every key of Redis with its serialized value."""
    return {key: client.dump(key) for key in client.scan_iter()}


def test_every_writing_script_has_a_row() -> None:
    rows = {call.partition(" ")[0] for lost in LOST_RIGHTS.values() for call in lost.calls}
    assert set(scripts.SCRIPTS) - READ_ONLY - NEEDS_NO_RIGHT == rows & set(scripts.SCRIPTS)


def test_one_conductor_leads_and_a_new_term_is_higher(control: Control) -> None:
    former = control.depose()
    assert int(control.leader.rpartition("|")[2]) > int(former.rpartition("|")[2])


def test_worker_is_fenced_only_with_the_deadline_that_the_leader_saw(control: Control) -> None:
    epoch = control.own()
    seen_us = int(control.client.zscore(keys.WORKERS, WORKER) or 0)
    assert control.renew() == "ok"
    assert control.run(scripts.fence_worker(control.leader, WORKER, deadline_us=seen_us)) == "alive"
    assert control.fence() == "ok"
    assert control.append(epoch) == "stale"
    assert (control.task()["state"], control.task()["owner"]) == ("granted", "")


def test_second_fence_of_a_worker_leaves_the_next_owner(control: Control) -> None:
    lose_task(control)
    epoch = control.epoch()
    assert control.run(scripts.fence_worker(control.leader, WORKER)) == "alive"
    assert control.leave() == "ok"
    assert (control.epoch(), control.task()["owner"]) == (epoch, OTHER)
    assert control.task()["deaths"] == "1"
