"""Verdict on a chaos run: lost and different answers, and leftovers. Pauses are summarised but not
judged. Measures nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from fleet.lab.faults.audio_calls import AudioOutcome
from fleet.lab.faults.captures import CaptureReport
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.load import Outcome
from fleet.lab.faults.pauses import (
    FaultGroup,
    Pauses,
    group_by_detection,
    group_by_kind,
    is_open_during,
    pauses_of,
)
from fleet.lab.faults.requests import is_sampled
from fleet.lab.faults.save_report import SaveReport, report_saves
from fleet.lab.faults.saves import SavedConversation
from fleet.lab.faults.schedule import Moment
from fleet.lab.faults.voice import ChaosSession
from fleet.lab.faults.watch import Residue
from fleet.lab.report.machine import Machine

INVARIANT = "invariant"


class ChaosRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a chaos run, with its options and environment.

    `began`: local time, ISO 8601. `replicas`, `standby`: numbers of workers by role. `requests`:
    number of different requests, each sent at least once under faults. `slow`: outcomes of clients
    that read slowly for a while. `voice`: number of voice sessions. `audio_calls`: speech and
    transcription calls; () unless the graph has separate stages for them. `faults_left`: number of
    faults that were not injected although there was time for them. `captures`: result of the
    hidden-state samples for the trainer, None without a trainer.
    """

    began: str
    command: tuple[str, ...]
    machine: Machine
    model: str
    numerics: str
    seed: int
    requests: int
    concurrency: int
    replicas: dict[str, int]
    standby: dict[str, int]
    voice: int = 0
    faults: tuple[InjectedFault, ...]
    faults_left: int
    residue: Residue
    sessions: tuple[ChaosSession, ...] = ()
    audio_calls: tuple[AudioOutcome, ...] = ()
    conversations: tuple[SavedConversation, ...] = ()
    captures: CaptureReport | None = None
    undisturbed: tuple[Outcome, ...]
    disturbed: tuple[Outcome, ...]
    slow: tuple[Outcome, ...] = ()


class Verdict(ChaosRecord, frozen=True, kw_only=True):
    """The record of a chaos run with its judgement.

    `open_requests`: number of requests that were open when a signal was sent, or started while a
    process was stopped. `faults_by_role`: counts by role and signal. `aimed`: number of faults that
    waited for an event, by the event's name; `in_moment`: number of faults injected while that
    event was under way. `refusals`: number of refused tries, after each of which the client tried
    again; slow readers do not count. `saves`: report on saved conversations, None without any.
    """

    passed: bool
    answered: int
    answered_greedy: int
    answered_sampled: int
    gateway_changes: int
    refusals: int
    lost: tuple[Outcome, ...]
    changed: tuple[Outcome, ...]
    different: tuple[Outcome, ...]
    open_requests: int
    pauses_open: Pauses
    pauses_undisturbed: Pauses
    kinds: tuple[FaultGroup, ...]
    detections: tuple[FaultGroup, ...]
    faults_by_role: dict[str, dict[str, int]]
    aimed: dict[str, int]
    in_moment: dict[str, int]
    saves: SaveReport | None


def judge(record: ChaosRecord) -> Verdict:
    """Judge a run: it passes if nothing is lost, changed, different or left over, and the fleet
    recovered from every fault.

    Differences from the reference count only with invariant numerics; otherwise even undisturbed
    answers may differ by rounding.
    """
    disturbed, faults = record.disturbed, record.faults
    judged = (*disturbed, *record.slow)
    lost = tuple(outcome for outcome in judged if outcome.lost)
    changed = tuple(outcome for outcome in judged if outcome.changed)
    different = tuple(outcome for outcome in judged if outcome.difference)
    open_requests = [
        outcome for outcome in disturbed if any(is_open_during(outcome, fault) for fault in faults)
    ]
    answered = len(judged) - len(lost)
    sampled = sum(is_sampled(outcome.request) for outcome in judged if not outcome.lost)
    alone = {
        role
        for role, count in record.replicas.items()
        if count == 1 and not record.standby.get(role)
    }
    saves = report_saves(record.conversations, faults)
    is_exact = record.numerics == INVARIANT
    wrong = (
        *lost,
        *changed,
        *(different if is_exact else ()),
        *(saves.wrong if saves else ()),
        *(call for call in record.audio_calls if call.lost),
        *(call for call in record.audio_calls if call.different and is_exact),
    )
    return Verdict(
        **msgspec.structs.asdict(record),
        passed=not wrong and _is_recovered(record) and _is_spoken(record.sessions),
        answered=answered,
        answered_greedy=answered - sampled,
        answered_sampled=sampled,
        gateway_changes=sum(outcome.gateway_changes for outcome in disturbed),
        refusals=sum(outcome.refusals for outcome in disturbed),
        lost=lost,
        changed=changed,
        different=different,
        open_requests=len(open_requests),
        pauses_open=pauses_of(open_requests),
        pauses_undisturbed=pauses_of(record.undisturbed),
        kinds=group_by_kind(disturbed, faults, alone),
        detections=group_by_detection(disturbed, faults, alone),
        faults_by_role=_count_by_role(faults),
        aimed=dict(Counter(fault.moment for fault in faults if fault.moment is not Moment.ANY)),
        in_moment=dict(Counter(fault.moment for fault in faults if fault.in_moment)),
        saves=saves,
    )


def _is_recovered(record: ChaosRecord) -> bool:
    """Return True if the fleet recovered from all faults without leftovers, and the trainer has all
    samples.
    """
    recovered = all(fault.recovered_s is not None for fault in record.faults)
    captured = record.captures is None or not record.captures.wrong
    return recovered and captured and not record.faults_left and record.residue.is_empty


def _is_spoken(sessions: Sequence[ChaosSession]) -> bool:
    """Return True if no voice session lost a turn, received audio that differs from its log, or
    forgot an item of its conversation.
    """
    failed = [turn for session in sessions for turn in session.turns if turn.lost or turn.different]
    return not failed and not any(session.forgotten for session in sessions)


def _count_by_role(faults: Sequence[InjectedFault]) -> dict[str, dict[str, int]]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for fault in faults:
        counts[fault.role][fault.signal] += 1
    return {role: dict(of_role) for role, of_role in counts.items()}
