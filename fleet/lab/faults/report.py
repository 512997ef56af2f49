"""The verdict: lost and different answers, leftovers; and the pauses, which are not judged.
Measures nothing.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group

from fleet.lab.faults.captures import CaptureReport, captures_table
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.load import Outcome
from fleet.lab.faults.pauses import (
    FaultGroup,
    Pauses,
    by_detection,
    by_kind,
    is_open_during,
    pauses_of,
)
from fleet.lab.faults.recovery import DETECTED_BY
from fleet.lab.faults.requests import is_sampled
from fleet.lab.faults.save_report import SaveReport, reason_lines, report_saves, saves_table
from fleet.lab.faults.saves import SavedConversation
from fleet.lab.faults.schedule import REDIS, SIGNALS, Moment
from fleet.lab.faults.voice import ChaosSession
from fleet.lab.faults.watch import Residue
from fleet.lab.report.machine import Machine
from fleet.lab.report.stats import Summary, summarise
from fleet.lab.report.tables import NONE, table_of, titled

INVARIANT = "invariant"
SHOWN = 8


class ChaosSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The run's options and environment. `began`: local time, ISO 8601. `replicas`, `standby`:
    workers by role.

    `requests`: the number of different ones, each sent at least once under faults. `voice`: voice
    sessions beside them.
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


class Verdict(ChaosSetup, frozen=True, kw_only=True):
    """One run.

    `open_requests`: those that were open when a signal was sent, or started while a process was
    stopped. `faults_by_role`: counts by role and signal. `aimed`: faults that waited for a moment,
    by its name; `in_moment`: those that hit it. `refusals`: answers with status 503, after each of
    which the client tried again. `saves`: None without conversations that are saved; `captures`:
    None without a trainer.
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
    faults: tuple[InjectedFault, ...]
    faults_left: int
    residue: Residue
    sessions: tuple[ChaosSession, ...]
    saves: SaveReport | None
    conversations: tuple[SavedConversation, ...]
    captures: CaptureReport | None
    undisturbed: tuple[Outcome, ...]
    disturbed: tuple[Outcome, ...]


def judge(
    setup: ChaosSetup,
    undisturbed: Sequence[Outcome],
    disturbed: Sequence[Outcome],
    sessions: Sequence[ChaosSession],
    faults: Sequence[InjectedFault],
    num_faults: int,
    residue: Residue,
    conversations: Sequence[SavedConversation] = (),
    captures: CaptureReport | None = None,
) -> Verdict:
    """A run passes if nothing is lost, changed, different or left over, and the fleet recovered
    from every fault.

    Differences count only with invariant numerics: else the undisturbed run has roundings of its
    own.
    """
    lost = tuple(outcome for outcome in disturbed if outcome.lost)
    changed = tuple(outcome for outcome in disturbed if outcome.changed)
    different = tuple(outcome for outcome in disturbed if outcome.difference)
    open_requests = [
        outcome for outcome in disturbed if any(is_open_during(outcome, fault) for fault in faults)
    ]
    recovered = len(faults) == num_faults and all(fault.recovered_s is not None for fault in faults)
    answered = [outcome for outcome in disturbed if not outcome.lost]
    sampled = sum(is_sampled(outcome.request) for outcome in answered)
    alone = {
        role for role, count in setup.replicas.items() if count == 1 and not setup.standby.get(role)
    }
    turns = [turn for session in sessions for turn in session.turns]
    spoken = not any(turn.lost or turn.different for turn in turns) and not any(
        session.forgotten for session in sessions
    )
    saves = report_saves(conversations, faults)
    saved = saves is None or not saves.wrong
    captured = captures is None or not captures.wrong
    complete = not lost and not changed and spoken and saved and captured and residue.is_empty
    return Verdict(
        passed=complete and recovered and not (different and setup.numerics == INVARIANT),
        **msgspec.structs.asdict(setup),
        answered=len(answered),
        answered_greedy=len(answered) - sampled,
        answered_sampled=sampled,
        gateway_changes=sum(outcome.gateway_changes for outcome in disturbed),
        refusals=sum(outcome.refusals for outcome in disturbed),
        lost=lost,
        changed=changed,
        different=different,
        open_requests=len(open_requests),
        pauses_open=pauses_of(open_requests),
        pauses_undisturbed=pauses_of(undisturbed),
        kinds=by_kind(disturbed, faults, alone),
        detections=by_detection(disturbed, faults, alone),
        faults_by_role=_count_by_role(faults),
        aimed=dict(Counter(fault.moment for fault in faults if fault.moment is not Moment.ANY)),
        in_moment=dict(Counter(fault.moment for fault in faults if fault.in_moment)),
        faults=tuple(faults),
        faults_left=num_faults - len(faults),
        residue=residue,
        sessions=tuple(sessions),
        saves=saves,
        conversations=tuple(conversations),
        captures=captures,
        undisturbed=tuple(undisturbed),
        disturbed=tuple(disturbed),
    )


def _count_by_role(faults: Sequence[InjectedFault]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for fault in faults:
        of_role = counts.setdefault(fault.role, {})
        of_role[fault.signal] = of_role.get(fault.signal, 0) + 1
    return counts


def show(verdict: Verdict, console: Console) -> None:
    colour, word = ("green", "passed") if verdict.passed else ("red", "failed")
    tables = (
        _answers_table(verdict),
        _voice_table(verdict),
        saves_table(verdict.saves) if verdict.saves else None,
        captures_table(verdict.captures) if verdict.captures else None,
        _faults_table(verdict),
        _redis_table(verdict),
        _pauses_table(verdict),
        _affected_table(verdict),
    )
    for table in tables:
        if table is not None:
            console.print(table)
    for line in _failures(verdict):
        console.print(line, style="red", highlight=False, soft_wrap=True, markup=False)
    if verdict.numerics != INVARIANT and verdict.different:
        console.print(_rounding_line(verdict), highlight=False, soft_wrap=True)
    for line in reason_lines(verdict.saves) if verdict.saves else ():
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for moment, count in verdict.aimed.items():
        line = (
            f"{count} faults waited for a {moment}, {verdict.in_moment.get(moment, 0)} were "
            "injected before its end"
        )
        console.print(line, highlight=False, soft_wrap=True)
    load = f"{verdict.model}, {verdict.concurrency} requests at a time, seed {verdict.seed}"
    console.print(f"[{colour}]chaos {word}[/] ({load})", highlight=False, soft_wrap=True)


def _rounding_line(verdict: Verdict) -> str:
    rounded = sum(bool(one.difference and one.difference.is_rounding) for one in verdict.different)
    return (
        f"numerics are {verdict.numerics}, so differences do not fail the run: {rounded} of "
        f"{verdict.answered} answers differ in "
        f"the last bits of samples, {len(verdict.different) - rounded} diverged; with --set "
        "numerics=invariant none may differ"
    )


def _answers_table(verdict: Verdict) -> Group:
    table = table_of("", "count")
    rows = (
        ("requests", len(verdict.disturbed)),
        ("answered, greedy", verdict.answered_greedy),
        ("answered, sampled with a seed", verdict.answered_sampled),
        ("open during a fault", verdict.open_requests),
        ("resumed at another gateway", verdict.gateway_changes),
        ("refused with 503, then sent again", verdict.refusals),
        ("lost", len(verdict.lost)),
        ("changed when read once more", len(verdict.changed)),
        ("no longer there to read once more", sum(outcome.unread for outcome in verdict.disturbed)),
        ("different in any byte", len(verdict.different)),
        ("still live at the end", verdict.residue.live),
        ("grants left", verdict.residue.queued),
        ("tasks left with workers", verdict.residue.running),
        ("arena slots left", verdict.residue.arena_slots),
        ("KV pages left", verdict.residue.kv_pages),
        ("keys that never expire", verdict.residue.num_keys),
    )
    for name, count in rows:
        table.add_row(name, str(count))
    return titled("answers under faults", table)


def _pauses_table(verdict: Verdict) -> Group:
    table = table_of("", "requests", "p50", "p95", "max")
    for name, pauses in (
        ("undisturbed", verdict.pauses_undisturbed),
        ("open during a fault", verdict.pauses_open),
    ):
        parts = (
            ("longest gap", pauses.gap_s),
            ("first audio", pauses.first_s),
            ("stalls of playback", pauses.stalled_s),
        )
        for part, summary in parts:
            table.add_row(f"{name}: {part}", str(summary.count if summary else 0), *_ms(summary))
    return titled("pauses of clients, ms", table)


def _ms(summary: Summary | None) -> list[str]:
    """Return p50, p95 and the maximum."""
    return (
        [f"{value * 1e3:.0f}" for value in (summary.p50, summary.p95, summary.high)]
        if summary
        else [NONE] * 3
    )


def _affected_table(verdict: Verdict) -> Group:
    """Nothing is subtracted; the pauses of undisturbed requests have a table of their own."""
    pauses = ("pause p50", "p95", "max", "gap p95")
    table = table_of(
        "fault",
        "detected by",
        "faults",
        "requests",
        *pauses,
        "fenced p95",
        "claimed p95",
        "joined p50",
    )
    for group in (*verdict.kinds, *verdict.detections):
        name = f"{group.signal} {group.role}" if group.role else "all"
        detected = DETECTED_BY.get(group.detected, NONE) + (", only worker" if group.alone else "")
        times = [
            f"{one.p95 * 1e3:.0f}" if one else NONE
            for one in (group.gap_s, group.fenced_s, group.claimed_s)
        ]
        joined = f"{group.joined_s.p50 * 1e3:.0f}" if group.joined_s else NONE
        table.add_row(
            name,
            detected,
            str(group.faults),
            str(group.affected),
            *_ms(group.pause_s),
            *times,
            joined,
        )
    return titled("pauses of affected requests, and times after the fault, ms", table)


def _voice_table(verdict: Verdict) -> Group | None:
    if not verdict.sessions:
        return None
    turns = [turn for session in verdict.sessions for turn in session.turns]
    table = table_of("", "count")
    rows = (
        ("sessions", len(verdict.sessions)),
        ("turns", len(turns)),
        ("connections resumed", sum(turn.resumed for turn in turns)),
        ("responses asked for again", sum(turn.repeated for turn in turns)),
        ("lost", sum(bool(turn.lost) for turn in turns)),
        ("audio differs from the log", sum(turn.different for turn in turns)),
        ("log no longer there to compare", sum(turn.unread for turn in turns)),
        (
            "questions or answers forgotten",
            sum(len(session.forgotten) for session in verdict.sessions),
        ),
    )
    for name, count in rows:
        table.add_row(name, str(count))
    return titled("voice sessions under faults", table)


def _redis_table(verdict: Verdict) -> Group | None:
    faults = [fault for fault in verdict.faults if fault.role == REDIS]
    if not faults:
        return None
    table = table_of(
        "fault in Redis", "faults", "repaired after, s: p50", "recovered after, s: p50", "max"
    )
    for kind in dict.fromkeys(fault.kind for fault in faults):
        of_kind = [fault for fault in faults if fault.kind == kind]
        repaired = summarise([fault.until_s - fault.at_s for fault in of_kind])
        recovered = summarise([fault.recovered_s for fault in of_kind])
        times = (f"{recovered.p50:.1f}", f"{recovered.high:.1f}") if recovered else (NONE, NONE)
        table.add_row(kind, str(len(of_kind)), f"{repaired.p50:.1f}" if repaired else NONE, *times)
    return titled("faults in Redis", table)


def _faults_table(verdict: Verdict) -> Group | None:
    if all(fault.role == REDIS for fault in verdict.faults):
        return None
    table = table_of("role", *SIGNALS.values(), "requests", "recovered after, s: p50", "max")
    counts = Counter((fault.role, fault.kind) for fault in verdict.faults)
    for role in dict.fromkeys(fault.role for fault in verdict.faults if fault.role != REDIS):
        of_role = [fault for fault in verdict.faults if fault.role == role]
        recovered = summarise([fault.recovered_s for fault in of_role])
        table.add_row(
            role,
            *(str(counts[role, kind]) for kind in SIGNALS),
            str(sum(len(fault.requests) for fault in of_role)),
            *((f"{recovered.p50:.1f}", f"{recovered.high:.1f}") if recovered else (NONE, NONE)),
        )
    return titled("faults", table)


def _failures(verdict: Verdict) -> list[str]:
    lost = [
        f"request {one.request} was lost after {one.ended_s - one.sent_s:.1f} s: {one.lost}"
        for one in verdict.lost
    ]
    changed = [
        f"request {one.request} changed when it was read once more, in its {one.changed.medium} "
        "from byte "
        f"{one.changed.offset} on ({one.changed.received_bytes} bytes, at first "
        f"{one.changed.expected_bytes})"
        for one in verdict.changed
        if one.changed
    ]
    different = [
        f"request {one.request} differs in its {one.difference.medium} from byte "
        f"{one.difference.offset} on "
        f"({one.difference.received_bytes} bytes, undisturbed {one.difference.expected_bytes})"
        for one in verdict.different
        if one.difference and verdict.numerics == INVARIANT
    ]
    turns = [turn for session in verdict.sessions for turn in session.turns]
    unheard = [
        f"turn {one.turn} of voice session {one.session} was lost: {one.lost}"
        for one in turns
        if one.lost
    ]
    altered = [
        f"the audio of turn {one.turn} of voice session {one.session} is not that of its log"
        for one in turns
        if one.different
    ]
    forgotten = [f"voice {item}" for session in verdict.sessions for item in session.forgotten]
    keys = [f"key that never expires: {key}" for key in verdict.residue.keys]
    broken = [
        f"the fleet did not recover from {fault.signal} to {fault.target}"
        for fault in verdict.faults
        if fault.recovered_s is None
    ]
    left = [f"{verdict.faults_left} faults were not injected"] if verdict.faults_left else []
    unsaved = list(verdict.saves.wrong) if verdict.saves else []
    untrained = list(verdict.captures.wrong) if verdict.captures else []
    voice = (unheard, altered, forgotten, unsaved, untrained)
    busy = list(verdict.residue.busy)
    return [
        line
        for lines in (lost, changed, different, *voice, keys, busy, broken, left)
        for line in _limited(lines)
    ]


def _limited(lines: list[str]) -> list[str]:
    return (
        lines
        if len(lines) <= SHOWN
        else [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more like the last"]
    )
