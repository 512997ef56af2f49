"""Presentation of a run's verdict: tables on the terminal and a picture. Judges nothing."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group

from fleet.lab.faults.answer import Difference, longest_gap_s
from fleet.lab.faults.captures import CaptureReport
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.load import Outcome
from fleet.lab.faults.pauses import is_open_during
from fleet.lab.faults.recovery import DETECTED_BY
from fleet.lab.faults.save_report import SaveReport, reason_lines
from fleet.lab.faults.schedule import PROCESS_KINDS, REDIS, FaultKind, name_of
from fleet.lab.faults.verdict import INVARIANT, Verdict
from fleet.lab.report.plot import Axes, saved_figure
from fleet.lab.report.stats import Summary, summarise
from fleet.lab.report.tables import NONE, table_of, titled

SHOWN = 8
"""Largest number of failure lines shown per kind."""
COLOURS = {
    FaultKind.KILL: "#dc2626",
    FaultKind.STOP: "#2563eb",
    FaultKind.TERM: "#b45309",
    FaultKind.PAUSE: "#0891b2",
    FaultKind.HANG: "#be185d",
}
REDIS_COLOUR = "#7c3aed"
ANSWER, OPEN, UNDISTURBED, BAD = "#9ca3af", "#0d9488", "#6b7280", "#dc2626"
SIZE_INCHES = (11.0, 6.5)


def show(verdict: Verdict, console: Console) -> None:
    for table in _tables(verdict):
        console.print(table)
    for line in _failures(verdict):
        say(console, line, "red")
    if verdict.numerics != INVARIANT and verdict.different:
        say(console, _rounding_line(verdict))
    for line in reason_lines(verdict.saves) if verdict.saves else ():
        say(console, line)
    for moment, count in verdict.aimed.items():
        hits = verdict.in_moment.get(moment, 0)
        say(console, f"{count} faults waited for a {moment}, {hits} were injected before its end")
    load = f"{verdict.model}, {verdict.concurrency} requests at a time, seed {verdict.seed}"
    say_result(console, "chaos", verdict.passed, load)


def say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, highlight=False, soft_wrap=True, markup=False)


def say_result(console: Console, what: str, passed: bool, load: str) -> None:
    colour, word = ("green", "passed") if passed else ("red", "failed")
    console.print(f"[{colour}]{what} {word}[/] ({load})", highlight=False, soft_wrap=True)


def filled_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Group:
    table = table_of(*columns)
    for row in rows:
        table.add_row(*map(str, row))
    return titled(title, table)


def _tables(verdict: Verdict) -> Iterator[Group]:
    yield _counts("answers under faults", _answer_counts(verdict))
    if verdict.sessions:
        yield _counts("voice sessions under faults", _voice_counts(verdict))
    if verdict.audio_calls:
        yield _counts("speech and transcription calls under faults", _audio_call_counts(verdict))
    if verdict.saves:
        yield _counts("saved conversations under faults", _save_counts(verdict.saves))
    if verdict.captures:
        yield _counts("captures for the trainer under faults", _capture_counts(verdict.captures))
    in_redis = [fault for fault in verdict.faults if fault.role == REDIS]
    if in_processes := _in_processes(verdict):
        kinds = [name_of(kind) for kind in _process_kinds(in_processes)]
        columns = ("role", *kinds, "requests", "recovered after, s: p50", "max")
        yield filled_table("faults", columns, _fault_rows(verdict))
    if in_redis:
        columns = (
            "fault in Redis",
            "faults",
            "repaired after, s: p50",
            "recovered after, s: p50",
            "max",
        )
        yield filled_table("faults in Redis", columns, _redis_rows(in_redis))
    columns = ("", "requests", "p50", "p95", "max")
    yield filled_table("pauses of clients, ms", columns, _pause_rows(verdict))
    columns = ("fault", "detected by", "faults", "requests", "pause p50", "p95", "max")
    columns = (*columns, "gap p95", "fenced p95", "claimed p95", "joined p50")
    title = "pauses of affected requests, and times after the fault, ms"
    yield filled_table(title, columns, _affected_rows(verdict))


def _counts(title: str, rows: Iterable[Sequence[object]]) -> Group:
    return filled_table(title, ("", "count"), rows)


def _answer_counts(verdict: Verdict) -> Iterable[tuple[str, object]]:
    residue = verdict.residue
    return (
        ("requests", len(verdict.disturbed)),
        ("requests of slow readers", len(verdict.slow)),
        ("answered, greedy", verdict.answered_greedy),
        ("answered, sampled with a seed", verdict.answered_sampled),
        ("open during a fault", verdict.open_requests),
        ("resumed at another gateway", verdict.gateway_changes),
        ("refused with 429 or 503, then sent again", verdict.refusals),
        ("lost", len(verdict.lost)),
        ("changed when read once more", len(verdict.changed)),
        ("no longer there to read once more", sum(outcome.unread for outcome in verdict.disturbed)),
        ("different in any byte", len(verdict.different)),
        ("still live at the end", residue.live),
        ("grants left", residue.queued),
        ("tasks left with workers", residue.running),
        ("arena slots left", residue.arena_slots),
        ("KV pages left", residue.kv_pages),
        ("keys that never expire", residue.num_keys),
    )


def _voice_counts(verdict: Verdict) -> Iterable[tuple[str, object]]:
    turns = [turn for session in verdict.sessions for turn in session.turns]
    forgotten = sum(len(session.forgotten) for session in verdict.sessions)
    return (
        ("sessions", len(verdict.sessions)),
        ("turns", len(turns)),
        ("connections resumed", sum(turn.resumed for turn in turns)),
        ("responses asked for again", sum(turn.repeated for turn in turns)),
        ("lost", sum(bool(turn.lost) for turn in turns)),
        ("audio differs from the log", sum(turn.different for turn in turns)),
        ("log no longer there to compare", sum(turn.unread for turn in turns)),
        ("questions or answers forgotten", forgotten),
    )


def _audio_call_counts(verdict: Verdict) -> Iterable[tuple[str, object]]:
    calls = verdict.audio_calls
    return (
        *Counter(call.kind for call in calls).items(),
        ("sent again", sum(call.tries > 1 for call in calls)),
        ("lost", sum(bool(call.lost) for call in calls)),
        ("different in any byte", sum(call.different for call in calls)),
    )


def _save_counts(report: SaveReport) -> Iterable[tuple[str, object]]:
    return (
        ("conversations", report.conversations),
        ("turns", report.turns),
        ("saves", report.saves),
        ("saved whole", report.whole),
        ("struck by a fault", report.struck),
        *((f"  by {fault}", count) for fault, count in report.struck_by.items()),
        ("failed, struck by a fault", sum(report.struck_failed.values())),
        ("failed, before or after a fault", sum(report.unstruck_failed.values())),
        ("wrong", len(report.wrong)),
        ("duration of whole saves, ms: p50, max", _p50_and_max(report.whole_s)),
        ("duration of failed saves, ms: p50, max", _p50_and_max(report.failed_s)),
    )


def _p50_and_max(summary: Summary | None) -> str:
    return f"{_ms(summary, 'p50')}, {_ms(summary, 'high')}" if summary else NONE


def _capture_counts(report: CaptureReport) -> Iterable[tuple[str, object]]:
    return (
        ("acknowledged", report.acknowledged),
        *((f"lost: {code}", count) for code, count in report.failed.items()),
        ("windows in the last checkpoint", report.windows),
        ("wrong", len(report.wrong)),
    )


def _in_processes(verdict: Verdict) -> list[InjectedFault]:
    return [fault for fault in verdict.faults if fault.role != REDIS]


def _process_kinds(faults: Sequence[InjectedFault]) -> list[FaultKind]:
    """Return the kinds of some faults in processes, in the order of all kinds."""
    return [kind for kind in PROCESS_KINDS if any(fault.kind == kind for fault in faults)]


def _fault_rows(verdict: Verdict) -> Iterator[Sequence[object]]:
    faults = _in_processes(verdict)
    counts = Counter((fault.role, fault.kind) for fault in faults)
    for role in dict.fromkeys(fault.role for fault in faults):
        of_role = [fault for fault in faults if fault.role == role]
        requests = sum(len(fault.requests) for fault in of_role)
        of_kind = (counts[role, kind] for kind in _process_kinds(faults))
        yield role, *of_kind, requests, *_recovered(of_role)


def _redis_rows(faults: Sequence[InjectedFault]) -> Iterator[Sequence[object]]:
    for kind in dict.fromkeys(fault.kind for fault in faults):
        of_kind = [fault for fault in faults if fault.kind == kind]
        repaired = summarise([fault.until_s - fault.at_s for fault in of_kind])
        assert repaired is not None
        yield kind, len(of_kind), f"{repaired.p50:.1f}", *_recovered(of_kind)


def _recovered(faults: Sequence[InjectedFault]) -> tuple[str, str]:
    recovered = summarise([fault.recovered_s for fault in faults])
    return (f"{recovered.p50:.1f}", f"{recovered.high:.1f}") if recovered else (NONE, NONE)


def _pause_rows(verdict: Verdict) -> Iterator[Sequence[object]]:
    for name, pauses in (
        ("undisturbed", verdict.pauses_undisturbed),
        ("open during a fault", verdict.pauses_open),
    ):
        for part, summary in (
            ("longest gap", pauses.gap_s),
            ("first audio", pauses.first_s),
            ("stalls of playback", pauses.stalled_s),
        ):
            count = summary.count if summary else 0
            yield f"{name}: {part}", count, *(_ms(summary, at) for at in ("p50", "p95", "high"))


def _ms(summary: Summary | None, statistic: str) -> str:
    return f"{getattr(summary, statistic) * 1e3:.0f}" if summary else NONE


def _affected_rows(verdict: Verdict) -> Iterator[Sequence[object]]:
    """Yield a table row for each group of faults. Pauses are as measured; a separate table has the
    pauses of undisturbed requests.
    """
    for group in (*verdict.kinds, *verdict.detections):
        yield (
            f"{group.signal} {group.role}" if group.role else "all",
            DETECTED_BY.get(group.detected, NONE) + (", only worker" if group.alone else ""),
            group.faults,
            group.affected,
            *(_ms(group.pause_s, statistic) for statistic in ("p50", "p95", "high")),
            *(_ms(each, "p95") for each in (group.gap_s, group.fenced_s, group.claimed_s)),
            _ms(group.joined_s, "p50"),
        )


def _rounding_line(verdict: Verdict) -> str:
    rounded = sum(bool(one.difference and one.difference.is_rounding) for one in verdict.different)
    return (
        f"numerics are {verdict.numerics}, so differences do not fail the run: {rounded} of "
        f"{verdict.answered} answers differ in the last bits of samples, "
        f"{len(verdict.different) - rounded} diverged; with --set numerics=invariant none may "
        "differ"
    )


def _failures(verdict: Verdict) -> list[str]:
    turns = [turn for session in verdict.sessions for turn in session.turns]
    lists = (
        [
            f"request {one.request} was lost after {one.ended_s - one.sent_s:.1f} s: {one.lost}"
            for one in verdict.lost
        ],
        [
            f"request {one.request} changed when it was read once more, in its "
            f"{_sizes(one.changed, 'at first')}"
            for one in verdict.changed
        ],
        [
            f"request {one.request} differs in its {_sizes(one.difference, 'undisturbed')}"
            for one in verdict.different
            if verdict.numerics == INVARIANT
        ],
        [
            f"turn {one.turn} of voice session {one.session} was lost: {one.lost}"
            for one in turns
            if one.lost
        ],
        [
            f"the audio of turn {one.turn} of voice session {one.session} is not that of its log"
            for one in turns
            if one.different
        ],
        [f"a {call.kind} call was lost: {call.lost}" for call in verdict.audio_calls if call.lost],
        [
            f"the answer to a {call.kind} call differs from the undisturbed one"
            for call in verdict.audio_calls
            if call.different and verdict.numerics == INVARIANT
        ],
        [f"voice {item}" for session in verdict.sessions for item in session.forgotten],
        verdict.saves.wrong if verdict.saves else (),
        verdict.captures.wrong if verdict.captures else (),
        [f"key that never expires: {key}" for key in verdict.residue.keys],
        verdict.residue.busy,
        [
            f"the fleet did not recover from {fault.signal} to {fault.target}"
            for fault in verdict.faults
            if fault.recovered_s is None
        ],
        [f"{verdict.faults_left} faults were not injected"] if verdict.faults_left else [],
    )
    return [line for lines in lists for line in _limited(lines)]


def _sizes(difference: Difference | None, before: str) -> str:
    assert difference is not None
    return (
        f"{difference.medium} from byte {difference.offset} on ({difference.received_bytes} bytes, "
        f"{before} {difference.expected_bytes})"
    )


def _limited(lines: Sequence[str]) -> Sequence[str]:
    if len(lines) <= SHOWN:
        return lines
    return [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more like the last"]


def draw(verdict: Verdict, path: Path) -> None:
    """Draw each answer as a horizontal line in time, the faults as lines across, and the gaps in a
    panel beside.
    """
    result = "passed" if verdict.passed else "failed"
    title = (
        f"chaos {result}: {verdict.model}, seed {verdict.seed}, {len(verdict.disturbed)} requests, "
        f"{len(verdict.lost)} lost, {len(verdict.changed)} changed, "
        f"{len(verdict.different)} different, {len(verdict.faults)} faults"
    )
    with saved_figure(path, 1, 2, SIZE_INCHES, width_ratios=(3, 1)) as (figure, (times, gaps)):
        _draw_timeline(times, verdict)
        _draw_gaps(gaps, verdict)
        figure.suptitle(title, fontsize=10)


def _is_open(outcome: Outcome, verdict: Verdict) -> bool:
    return any(is_open_during(outcome, fault) for fault in verdict.faults)


def _draw_timeline(axes: Axes, verdict: Verdict) -> None:
    for place, outcome in enumerate(sorted(verdict.disturbed, key=lambda one: one.sent_s)):
        colour = OPEN if _is_open(outcome, verdict) else ANSWER
        colour = BAD if outcome.lost or outcome.difference else colour
        axes.plot((outcome.sent_s, outcome.ended_s), (place, place), color=colour, linewidth=0.8)
        chunks_s = [outcome.sent_s + at_s for at_s in outcome.chunks_s]
        axes.plot(chunks_s, [place] * len(chunks_s), ".", color=colour, markersize=3)
    look = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top", "ha": "right"}
    for fault in verdict.faults:
        colour = COLOURS.get(fault.kind, REDIS_COLOUR)
        axes.axvline(fault.at_s, color=colour, linewidth=1)
        end_s = fault.at_s + fault.recovered_s if fault.recovered_s else axes.get_xlim()[1]
        axes.axvspan(fault.at_s, end_s, color=colour, alpha=0.08)
        name = f"{fault.signal} {fault.role}"
        axes.annotate(name, (fault.at_s, 1.0), **look, fontsize=7, color=colour)
    axes.set(xlabel="s", ylabel="answers")
    title = "every answer, chunk by chunk; shaded: until the fleet has recovered"
    axes.set_title(title, fontsize=9)


def _draw_gaps(axes: Axes, verdict: Verdict) -> None:
    open_during = [one for one in verdict.disturbed if _is_open(one, verdict)]
    groups = (
        ("undisturbed", UNDISTURBED, verdict.undisturbed),
        ("open during\na fault", OPEN, open_during),
    )
    for place, (label, colour, outcomes) in enumerate(groups):
        known = [gap_s for one in outcomes if (gap_s := longest_gap_s(one.chunks_s)) is not None]
        width = max(1, len(known) - 1)
        places = [place + 0.3 * (index / width - 0.5) for index in range(len(known))]
        axes.plot(places, sorted(known), ".", color=colour, label=label)
    axes.set_xticks((0, 1), [label for label, _, _ in groups], fontsize=8)
    axes.set(ylabel="s", xlim=(-0.5, 1.5))
    axes.set_ylim(bottom=0)
    axes.set_title("longest gap of each answer", fontsize=9)
    axes.grid(axis="y", alpha=0.25)
