"""The verdict: what was lost, what differed, what stayed; and the pauses heard, which are not judged. Measures nothing."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fleet.chaos.faults import InjectedFault
from fleet.chaos.load import Outcome
from fleet.chaos.pauses import Kind, Pauses, by_finding, by_kind, is_caught, pauses
from fleet.chaos.recovery import BY_WHOM
from fleet.chaos.requests import is_drawn
from fleet.chaos.schedule import SIGNALS
from fleet.chaos.watch import Residue
from fleet.reporting.machine import Machine
from fleet.reporting.stats import Summary, summarise

NONE = "-"
INVARIANT = "invariant"
SHOWN = 8


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `began` is local time, ISO 8601; `requests` are those that differ, each sent at least once while struck.

    `caught` are the requests that were under way when a signal fell, or started while a process was stopped. `struck_roles`
    counts blows by role and signal; `aimed` those that waited for a hand-off, `in_hand_off` those that met one. `moves` counts
    changes of gateway in mid-answer. `replicas` and `standby` are workers by role.
    """

    passed: bool
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
    answered: int
    answered_greedy: int
    answered_drawn: int
    moves: int
    lost: tuple[Outcome, ...]
    changed: tuple[Outcome, ...]
    different: tuple[Outcome, ...]
    caught: int
    pauses_caught: Pauses
    pauses_undisturbed: Pauses
    kinds: tuple[Kind, ...]
    findings: tuple[Kind, ...]
    struck_roles: dict[str, dict[str, int]]
    aimed: int
    in_hand_off: int
    hits: tuple[InjectedFault, ...]
    blows_left: int
    residue: Residue
    undisturbed: tuple[Outcome, ...]
    disturbed: tuple[Outcome, ...]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, and where."""

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


def judge(
    run: Run,
    undisturbed: Sequence[Outcome],
    disturbed: Sequence[Outcome],
    hits: Sequence[InjectedFault],
    blows: int,
    residue: Residue,
) -> Verdict:
    """Passed: nothing lost, changed, different or left, and the fleet whole again after every blow.

    Only where numerics are invariant is a difference a fault: else the undisturbed run has roundings of its own.
    """
    lost = tuple(outcome for outcome in disturbed if outcome.lost)
    changed = tuple(outcome for outcome in disturbed if outcome.changed)
    different = tuple(outcome for outcome in disturbed if outcome.difference)
    caught = [outcome for outcome in disturbed if any(is_caught(outcome, hit) for hit in hits)]
    recovered = len(hits) == blows and all(hit.whole_s is not None for hit in hits)
    answered = [outcome for outcome in disturbed if not outcome.lost]
    drawn = sum(is_drawn(outcome.request) for outcome in answered)
    alone = {role for role, count in run.replicas.items() if count == 1 and not run.standby.get(role)}
    return Verdict(
        passed=not lost and not changed and residue.nothing and recovered and not (different and run.numerics == INVARIANT),
        **msgspec.structs.asdict(run),
        answered=len(answered),
        answered_greedy=len(answered) - drawn,
        answered_drawn=drawn,
        moves=sum(outcome.moves for outcome in disturbed),
        lost=lost,
        changed=changed,
        different=different,
        caught=len(caught),
        pauses_caught=pauses(caught),
        pauses_undisturbed=pauses(undisturbed),
        kinds=by_kind(disturbed, hits, alone),
        findings=by_finding(disturbed, hits, alone),
        struck_roles=_struck_roles(hits),
        aimed=sum(hit.aimed for hit in hits),
        in_hand_off=sum(hit.in_hand_off for hit in hits),
        hits=tuple(hits),
        blows_left=blows - len(hits),
        residue=residue,
        undisturbed=tuple(undisturbed),
        disturbed=tuple(disturbed),
    )


def _struck_roles(hits: Sequence[InjectedFault]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for hit in hits:
        of_role = counts.setdefault(hit.role, {})
        of_role[hit.signal] = of_role.get(hit.signal, 0) + 1
    return counts


def write_json(verdict: Verdict, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(verdict), indent=1) + b"\n")


def show(verdict: Verdict, console: Console) -> None:
    colour, word = ("green", "passed") if verdict.passed else ("red", "failed")
    for table in (_answers(verdict), _hits(verdict), _pauses(verdict), _struck(verdict)):
        console.print(table)
    for line in _complaints(verdict):
        console.print(line, style="red", highlight=False, soft_wrap=True, markup=False)
    if verdict.numerics != INVARIANT and verdict.different:
        console.print(_of_rounding(verdict), highlight=False, soft_wrap=True)
    if verdict.aimed:
        line = f"{verdict.aimed} blows waited for a hand-off, {verdict.in_hand_off} fell before it was confirmed"
        console.print(line, highlight=False, soft_wrap=True)
    how_many = f"{verdict.model}, {verdict.concurrency} at a time, seed {verdict.seed}"
    console.print(f"[{colour}]chaos {word}[/] ({how_many})", highlight=False, soft_wrap=True)


def _of_rounding(verdict: Verdict) -> str:
    rounded = sum(bool(one.difference and one.difference.is_rounding) for one in verdict.different)
    return (
        f"numerics are {verdict.numerics}, so a difference is not judged: {rounded} of {verdict.answered} answers differ in the "
        f"last bits of samples, {len(verdict.different) - rounded} went another way; with --set numerics=invariant none may"
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(headings[0])
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    return table


def _answers(verdict: Verdict) -> Table:
    table = _table("answers while processes were struck", "", "count")
    rows = (
        ("requests", len(verdict.disturbed)),
        ("answered, greedy", verdict.answered_greedy),
        ("answered, drawn with a seed", verdict.answered_drawn),
        ("under way during a blow", verdict.caught),
        ("taken over from a lost gateway", verdict.moves),
        ("lost", len(verdict.lost)),
        ("told otherwise when asked once more", len(verdict.changed)),
        ("differing in any byte", len(verdict.different)),
        ("still live at the end", verdict.residue.live),
        ("grants left", verdict.residue.queued),
        ("tasks left with workers", verdict.residue.running),
        ("arena slots left", verdict.residue.arena_slots),
        ("KV pages left", verdict.residue.kv_pages),
        ("keys without an end", verdict.residue.num_keys),
    )
    for name, count in rows:
        table.add_row(name, str(count))
    return table


def _pauses(verdict: Verdict) -> Table:
    table = _table("pauses heard, ms", "", "requests", "p50", "p95", "max")
    for name, pauses_ in (("undisturbed", verdict.pauses_undisturbed), ("under way during a blow", verdict.pauses_caught)):
        parts = (("longest gap", pauses_.gap_s), ("first sound", pauses_.first_s), ("silence when played", pauses_.stalled_s))
        for what, summary in parts:
            table.add_row(f"{name}: {what}", str(summary.count if summary else 0), *_ms(summary))
    return table


def _ms(summary: Summary | None) -> list[str]:
    """p50, p95 and the highest."""
    return [f"{value * 1e3:.0f}" for value in (summary.p50, summary.p95, summary.high)] if summary else [NONE] * 3


def _struck(verdict: Verdict) -> Table:
    """Nothing is subtracted; what the undisturbed requests heard stands above."""
    title = "pauses of requests that were struck, ms; found and claimed again after (p95), another loaded after (p50), ms"
    pause = ("pause p50", "p95", "max", "gap p95")
    table = _table(title, "blow", "found by", "blows", "requests", *pause, "found", "claimed", "loaded")
    for kind in (*verdict.kinds, *verdict.findings):
        name = f"{kind.signal} {kind.role}" if kind.role else "all"
        found = BY_WHOM.get(kind.found, NONE) + (", alone" if kind.alone else "")
        at = [f"{one.p95 * 1e3:.0f}" if one else NONE for one in (kind.fenced_s, kind.claimed_s)]
        joined = f"{kind.joined_s.p50 * 1e3:.0f}" if kind.joined_s else NONE
        gap = f"{kind.gap_s.p95 * 1e3:.0f}" if kind.gap_s else NONE
        table.add_row(name, found, str(kind.hits), str(kind.struck), *_ms(kind.pause_s), gap, *at, joined)
    return table


def _hits(verdict: Verdict) -> Table:
    hows = list(SIGNALS)
    table = _table("blows", "role", *(SIGNALS[how] for how in hows), "requests held", "whole again after, s: p50", "max")
    fell = Counter((hit.role, hit.how) for hit in verdict.hits)
    for role in dict.fromkeys(hit.role for hit in verdict.hits):
        of_role = [hit for hit in verdict.hits if hit.role == role]
        whole = summarise([hit.whole_s for hit in of_role])
        table.add_row(
            role,
            *(str(fell[role, how]) for how in hows),
            str(sum(len(hit.requests) for hit in of_role)),
            *((f"{whole.p50:.1f}", f"{whole.high:.1f}") if whole else (NONE, NONE)),
        )
    return table


def _complaints(verdict: Verdict) -> list[str]:
    lost = [f"request {one.request} was lost after {one.ended_s - one.sent_s:.1f} s: {one.lost}" for one in verdict.lost]
    changed = [
        f"request {one.request} was told otherwise when asked once more, in its {one.changed.medium} from byte "
        f"{one.changed.offset} on ({one.changed.got_bytes} bytes, heard {one.changed.expected_bytes})"
        for one in verdict.changed
        if one.changed
    ]
    different = [
        f"request {one.request} differs in its {one.difference.medium} from byte {one.difference.offset} on "
        f"({one.difference.got_bytes} bytes, undisturbed {one.difference.expected_bytes})"
        for one in verdict.different
        if one.difference and verdict.numerics == INVARIANT
    ]
    stayed = [f"key without an end: {key}" for key in verdict.residue.keys]
    broken = [f"the fleet was not whole again after {hit.signal} to {hit.victim}" for hit in verdict.hits if hit.whole_s is None]
    left = [f"{verdict.blows_left} blows were not struck"] if verdict.blows_left else []
    return [line for lines in (lost, changed, different, stayed, broken, left) for line in _some(lines)]


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more like the last"]
