"""Verdict of `fleet chaos`, without a fleet: what fails a run, what is shown, and the pauses."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from fleet.lab.faults.answer import Difference
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.load import Outcome
from fleet.lab.faults.pauses import longest_gap_within_s
from fleet.lab.faults.recovery import Recovery
from fleet.lab.faults.report import draw, show
from fleet.lab.faults.schedule import REDIS, FaultKind
from fleet.lab.faults.verdict import ChaosRecord, Verdict, judge
from fleet.lab.faults.voice import ChaosSession, ChaosTurn
from fleet.lab.faults.watch import Residue
from fleet.lab.report.files import write_json
from fleet.lab.report.machine import describe_machine

LAPSED = Recovery(
    detected="lapsed", fenced_s=1.0, granted_s=1.1, claimed_s=1.2, requests=("req-1",)
)
FAULT = InjectedFault(
    role="talker",
    kind=FaultKind.STOP,
    target="talker@h:1:a",
    requests=("req-1",),
    at_s=2.0,
    until_s=5.0,
    recovered_s=6.0,
    recovery=LAPSED,
)
COMPLETE = (
    Outcome(request=0, id="req-0", sent_s=0.0, ended_s=1.0, chunks_s=(0.2, 0.3)),
    Outcome(request=1, id="req-1", sent_s=1.0, ended_s=9.0, chunks_s=(0.2, 3.2, 3.4)),
)


def verdict(
    disturbed: tuple[Outcome, ...] = COMPLETE,
    faults: tuple[InjectedFault, ...] = (FAULT,),
    residue: Residue | None = None,
    num_faults: int = 1,
    replicas: int = 2,
    numerics: str = "invariant",
    sessions: tuple[ChaosSession, ...] = (),
) -> Verdict:
    record = ChaosRecord(
        began="2026-01-01T00:00:00+0000",
        command=("chaos",),
        machine=describe_machine(),
        model="m",
        numerics=numerics,
        seed=0,
        requests=2,
        concurrency=2,
        replicas={"talker": replicas},
        standby={},
        undisturbed=COMPLETE[:1],
        disturbed=disturbed,
        sessions=sessions,
        faults=faults,
        faults_left=num_faults - len(faults),
        residue=residue or Residue(),
    )
    return judge(record)


def test_pauses_of_open_requests_are_reported_and_not_judged() -> None:
    judged = verdict()
    assert judged.passed and judged.open_requests == 1
    assert judged.pauses_open.gap_s is not None and judged.pauses_open.gap_s.high == 3.0
    assert (
        judged.pauses_undisturbed.gap_s is not None
        and judged.pauses_undisturbed.gap_s.high == pytest.approx(0.1)
    )


def test_gap_belongs_to_the_fault_before_its_end() -> None:
    one = Outcome(request=0, sent_s=10.0, ended_s=20.0, chunks_s=(1.0, 2.0, 5.0, 6.0))
    assert (
        longest_gap_within_s(one, 12.5, 14.0) == 3.0
        and longest_gap_within_s(one, 15.5, 16.5) == 1.0
    )
    assert (
        longest_gap_within_s(one, 16.5, 20.0) is None
        and longest_gap_within_s(one, 0.0, 10.5) is None
    )


def test_gap_long_after_tasks_continued_is_no_pause() -> None:
    late = Outcome(
        request=1,
        id="req-1",
        sent_s=1.0,
        ended_s=30.0,
        chunks_s=(0.2, 1.5, 2.0, 3.0, 5.1, 6.0, 16.0),
    )
    (kind,) = verdict(disturbed=(late,)).kinds
    assert kind.pause_s is not None and kind.gap_s is not None
    assert (kind.pause_s.high, kind.gap_s.high) == pytest.approx((2.1, 10.0))


def test_pauses_are_grouped_by_fault_kind_and_by_detection() -> None:
    died = msgspec.structs.replace(
        FAULT,
        kind=FaultKind.KILL,
        at_s=4.25,
        until_s=4.25,
        recovery=msgspec.structs.replace(LAPSED, detected="died"),
    )
    judged = verdict(faults=(FAULT, died), num_faults=2)
    assert [(kind.role, kind.signal, kind.detected, kind.affected) for kind in judged.kinds] == [
        ("talker", "SIGSTOP", "lapsed", 1),
        ("talker", "SIGKILL", "died", 1),
    ]
    assert [kind.gap_s.high for kind in judged.kinds if kind.gap_s] == pytest.approx([3.0, 0.2])
    assert [kind.pause_s.high for kind in judged.kinds if kind.pause_s] == pytest.approx([3.0, 0.2])
    assert [(kind.role, kind.detected, kind.faults, kind.alone) for kind in judged.detections] == [
        ("", "lapsed", 1, False),
        ("", "died", 1, False),
    ]
    assert judged.faults_by_role == {"talker": {"SIGSTOP": 1, "SIGKILL": 1}}
    assert (judged.answered_greedy, judged.answered_sampled) == (1, 1)
    assert [kind.alone for kind in verdict(replicas=1).kinds] == [True]


def test_faults_in_redis_have_no_detection() -> None:
    in_redis = InjectedFault(
        role=REDIS,
        kind=FaultKind.OOM,
        target="redis at port 1",
        requests=(),
        at_s=2.0,
        until_s=5.0,
        recovered_s=6.0,
    )
    judged = verdict(faults=(in_redis,))
    assert judged.passed and judged.detections == ()
    assert [(kind.signal, kind.affected) for kind in judged.kinds] == [("oom", 1)]
    assert "faults in Redis" in shown(judged)


def shown(verdict: Verdict) -> str:
    """Return a verdict as the terminal shows it."""
    console = Console(width=160, record=True, file=io.StringIO())
    show(verdict, console)
    return console.export_text()


def spoken(*, lost: str = "", different: bool = False) -> tuple[ChaosSession, ...]:
    return (
        ChaosSession(
            turns=(
                ChaosTurn(
                    session=0, turn=1, asked_s=0.0, ended_s=1.0, lost=lost, different=different
                ),
            )
        ),
    )


DIFFERENCE = Difference(medium="audio", offset=7, expected_bytes=9, received_bytes=9)


@pytest.mark.parametrize(
    ("failed", "line"),
    [
        (
            verdict((*COMPLETE, Outcome(request=3, sent_s=0, ended_s=2.5, lost="no end"))),
            "request 3 was lost after 2.5 s: no end",
        ),
        (
            verdict((Outcome(request=4, sent_s=0, ended_s=1, difference=DIFFERENCE),)),
            "request 4 differs in its audio",
        ),
        (
            verdict(
                (Outcome(request=5, sent_s=0, ended_s=1, changed=DIFFERENCE),), numerics="fast"
            ),
            "request 5 changed when it was read once more, in its audio from byte 7 on",
        ),
        (
            verdict(residue=Residue(num_keys=1, keys=("fleet:x (no row)",))),
            "key that never expires: fleet:x (no row)",
        ),
        (verdict(residue=Residue(arena_slots=2)), "arena slots left"),
        (
            verdict(faults=(msgspec.structs.replace(FAULT, recovered_s=None),)),
            "did not recover from SIGSTOP to talker@h:1:a",
        ),
        (verdict(num_faults=3), "2 faults were not injected"),
        (verdict(sessions=spoken(lost="no end")), "turn 1 of voice session 0 was lost: no end"),
        (
            verdict(sessions=spoken(different=True)),
            "the audio of turn 1 of voice session 0 is not that of its log",
        ),
        (
            verdict(
                sessions=(ChaosSession(turns=(), forgotten=("session 0, item_q0_1: missing",)),)
            ),
            "item_q0_1: missing",
        ),
    ],
)
def test_each_failure_alone_fails_the_run_and_is_shown(
    failed: Verdict, line: str, tmp_path: Path
) -> None:
    output = shown(failed)
    assert not failed.passed and "chaos failed" in output and line in output
    write_json(failed, tmp_path / "verdict.json")
    assert msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict) == failed
    draw(failed, tmp_path / "verdict.png")
    assert (tmp_path / "verdict.png").read_bytes().startswith(b"\x89PNG")


def test_fast_numerics_differences_are_counted_and_not_judged() -> None:
    rounded = msgspec.structs.replace(DIFFERENCE, peak=2)
    differ = [
        Outcome(request=at, sent_s=0, ended_s=1, difference=one)
        for at, one in enumerate((rounded, rounded, DIFFERENCE))
    ]
    judged = verdict((*COMPLETE, *differ), numerics="fast")
    output = shown(judged)
    assert judged.passed and "differs in its" not in output
    assert "2 of 5 answers differ in the last bits of samples, 1 diverged" in output
