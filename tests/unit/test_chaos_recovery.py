"""Recovery times after a fault, extracted from the control plane's events."""

from fleet.core import events as ev
from fleet.core.ids import Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.lab.faults.recovery import Recovery, recovery_of

STAGE, VICTIM, OTHER = StageName("lm"), WorkerId("lm@h:1:a"), WorkerId("lm@h:2:b")
FIRST, SECOND, BYSTANDER = RequestId("req-1"), RequestId("req-2"), RequestId("req-3")
FAULT_US = 5_000_400


def lost(request: RequestId, epoch: int) -> ev.TaskLost:
    return ev.TaskLost(request=request, stage=STAGE, epoch=Epoch(epoch))


def granted(request: RequestId, epoch: int) -> ev.TaskGranted:
    return ev.TaskGranted(request=request, stage=STAGE, epoch=Epoch(epoch))


def claimed(request: RequestId, epoch: int) -> ev.TaskClaimed:
    return ev.TaskClaimed(request=request, stage=STAGE, epoch=Epoch(epoch), owner=OTHER)


def left(worker: WorkerId, how: str) -> ev.WorkerLeft:
    return ev.WorkerLeft(worker=worker, how=how)


FENCING = [
    (5_020_000, lost(FIRST, 7)),
    (5_020_000, granted(FIRST, 9)),
    (5_020_000, lost(SECOND, 8)),
    (5_020_000, granted(SECOND, 10)),
    (5_020_000, left(VICTIM, "died")),
]


def recovered(*more: tuple[int, ev.AnyEvent]) -> Recovery:
    before: list[tuple[int, ev.AnyEvent]] = [
        (5_001_000, claimed(FIRST, 3)),
        (5_002_000, lost(BYSTANDER, 4)),
        (5_002_000, left(OTHER, "left")),
    ]
    return recovery_of([*before, *FENCING, *more], VICTIM, "lm", FAULT_US)


def test_recovery_times_count_from_the_fault_to_the_last_task() -> None:
    joined = ev.WorkerJoined(worker=WorkerId("lm@h:3:c"), role="lm")
    recovery = recovered(
        (5_030_000, claimed(SECOND, 10)),
        (5_040_000, claimed(FIRST, 9)),
        (6_000_400, claimed(FIRST, 12)),
        (7_000_400, joined),
    )
    assert recovery == Recovery(
        detected="died",
        fenced_s=0.0196,
        granted_s=0.0196,
        claimed_s=0.0396,
        joined_s=2.0,
        requests=(FIRST, SECOND),
    )


def test_unclaimed_task_leaves_claim_time_open_unless_its_request_ended() -> None:
    begun = (5_030_000, claimed(FIRST, 9))
    assert recovered(begun).claimed_s is None
    assert (
        recovered(begun, (5_050_000, ev.RequestEnded(request=SECOND, state="aborted"))).claimed_s
        == 0.0296
    )


def test_hand_off_is_no_new_grant() -> None:
    handed = ev.TaskHandedOff(
        request=FIRST, stage=STAGE, epoch=Epoch(9), role=RoleName("lm.decode")
    )
    assert (
        recovery_of(
            [FENCING[0], FENCING[-1], (5_021_000, handed)], VICTIM, "lm", FAULT_US
        ).granted_s
        is None
    )


def test_unregistered_target_has_no_recovery() -> None:
    assert recovery_of(FENCING, "conductor@h:9:z", "conductor", FAULT_US) == Recovery()
