"""The last hour, or another time, on one axis: marks of what happened, and the lives of processes.
Positions are percentages of the window. Knows no page and no colour.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.core.ids import stage_of
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import SERIES_KEPT_S, SERIES_STEP_S, WorkerView
from web.console import formats
from web.console.page_context import build_path
from web.gateway.fleet_metrics import GATEWAY_ROLE

STEP_US = SERIES_STEP_S * 1_000_000
MERGED = 1.25
"""Percentage of the window within which marks of one kind become one mark: 45 seconds of an hour.
"""
MAX_TRACKS, MAX_LANES, MAX_TICKS = 6, 24, 7
TICKS_US = tuple(minutes * 60_000_000 for minutes in (1, 2, 5, 10, 30, 60, 180, 720))
AROUND_US = 30_000_000
"""Time before and after a moment, in the lists of answers and log lines that a mark leads to."""
ENDS = ("died", "lapsed", "left")
MARKS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "deaths": ("Deaths", "✕", ("died", "lapsed")),
    "orders": ("Actions, drains", "▲", ("ordered", "leaving")),
    "failures": ("Failed answers", "!", ("failed",)),
    "refusals": ("Refusals", "⊘", ("refused",)),
    "starts": ("Joined, left", "●", ("joined", "left")),
    "conductor": ("Conductor", "◆", ("led",)),
}
"""Rows of marks: label, sign, and the kinds of entries that a row has."""
SAID = {
    "died": "died",
    "lapsed": "was fenced after its lease lapsed",
    "left": "left",
    "joined": "joined",
    "leaving": "leaves by its own decision",
    "led": "took over as conductor",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HourWindow:
    """The time that a page shows: the `length_us` before `to_us`, by default an hour."""

    to_us: int
    length_us: int = SERIES_KEPT_S * 1_000_000

    @classmethod
    def until(cls, now_us: int) -> "HourWindow":
        """Return the hour until the end of the present step of the time series, so that the page
        moves once per step.
        """
        return cls(to_us=(now_us // STEP_US + 1) * STEP_US)

    @classmethod
    def of(cls, from_us: int, to_us: int) -> "HourWindow":
        """Return the window from `from_us` to `to_us`, widened to whole steps of the series."""
        begin, end = from_us // STEP_US * STEP_US, (to_us // STEP_US + 1) * STEP_US
        return cls(to_us=end, length_us=end - begin)

    @property
    def from_us(self) -> int:
        return self.to_us - self.length_us

    def x(self, at_us: int) -> float:
        """Return the position of a time in per cent, 0 or 100 for a time outside the window."""
        share = (at_us - self.from_us) / (self.to_us - self.from_us)
        return round(100 * min(max(share, 0.0), 1.0), 2)

    @property
    def ticks(self) -> list[tuple[float, int]]:
        """Position and time of at most seven round times."""
        step = next(
            (step for step in TICKS_US if self.length_us < MAX_TICKS * step), self.length_us
        )
        first = -(-self.from_us // step) * step
        return [(self.x(at), at) for at in range(first, self.to_us, step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HourMark:
    """Events of a kind at nearly one time. `text` names them with their time."""

    key: str
    x: float
    count: int
    text: str
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRow:
    """Marks of one kind. `count`: number of events, which may exceed the number of marks, since
    events at nearly one time share a mark.
    """

    key: str
    label: str
    sign: str
    count: int
    marks: tuple[HourMark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The time of a process in the window. `died`: it ended by a death."""

    worker: str
    x: float
    width: float
    died: bool
    text: str

    @property
    def end(self) -> float:
        return round(self.x + self.width, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeRow:
    """Processes of a role that followed each other. `label`: the role in the first row of a role,
    "" in further rows. `num_more`: number of processes of the role that are not drawn, in the last
    row of a role; 0 in earlier rows.
    """

    key: str
    role: str
    label: str
    lives: tuple[Life, ...]
    num_more: int = 0


ORDERED = {
    "cancel": "was cancelled",
    "retry": "was sent as a retry",
    "redeliver": "was taken from its worker",
}
"""What an order did to an answer."""


def describe(entry: JournalEntry) -> str:
    """Describe an entry of the journal in one line, without its time."""
    who = entry.worker or entry.request or entry.role or "a process"
    detail = f": {entry.detail}" if entry.detail else ""
    if entry.what == "refused":
        count = max(entry.count, 1)
        return f"{count} request{'' if count == 1 else 's'} refused ({entry.code}){detail}"
    if entry.what == "ordered":
        by = f" by key {entry.by}" if entry.by else ""
        default = f"was set to {entry.detail or 'change'}"
        return f"{who} {ORDERED.get(entry.detail, default)}{by}"
    code = f" ({entry.code})" if entry.code else ""
    held = f", with {entry.count} task{'' if entry.count == 1 else 's'}" if entry.count else ""
    return f"{who} {SAID.get(entry.what, entry.what)}{code}{detail}{held}"


def link_of(entry: JournalEntry) -> str:
    """Return the page that explains an entry: its answer, its worker, or the log at its time."""
    if entry.request and entry.what in ("failed", "ordered"):
        return f"/requests/{entry.request}"
    if entry.worker and entry.what not in ("led", "refused"):
        return f"/workers/{entry.worker}"
    process = {"process": "conductor"} if entry.what == "led" else {}
    before = f"{(entry.at_us + AROUND_US) // 1000}-0"
    return build_path("/logs", {**process, "before": before})


def mark_rows(entries: Sequence[JournalEntry], window: HourWindow) -> tuple[MarkRow, ...]:
    """Return the rows that have a mark. `entries`: events, oldest first."""
    rows: list[MarkRow] = []
    for key, (label, sign, kinds) in MARKS.items():
        found = [entry for entry in entries if entry.what in kinds]
        marks = tuple(_mark(key, group, window) for group in _grouped(found, window))
        if marks:
            count = sum(_weight(entry) for entry in found)
            rows.append(MarkRow(key=key, label=label, sign=sign, count=count, marks=marks))
    return tuple(rows)


def _weight(entry: JournalEntry) -> int:
    return max(entry.count, 1) if entry.what == "refused" else 1


def _grouped(entries: Sequence[JournalEntry], window: HourWindow) -> Iterator[list[JournalEntry]]:
    """Yield the entries in groups, each within `MERGED` per cent of its first entry."""
    group: list[JournalEntry] = []
    for entry in entries:
        if group and window.x(entry.at_us) - window.x(group[0].at_us) > MERGED:
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _mark(row: str, group: Sequence[JournalEntry], window: HourWindow) -> HourMark:
    first, newest = group[0], group[-1]
    count = sum(_weight(entry) for entry in group)
    text = f"{formats.iso(newest.at_us)}: {describe(newest)}"
    href = link_of(newest)
    if len(group) > 1:
        text = f"{count} from {formats.iso(first.at_us)} on, the last {text}"
    if len(group) > 1 and newest.what == "failed":
        around = answers_between(first.at_us - AROUND_US, newest.at_us + AROUND_US)
        href = f"{around}&state=failed"
    return HourMark(
        key=f"m-{row}-{first.id}", x=window.x(newest.at_us), count=count, text=text, href=href
    )


def answers_between(from_us: int, to_us: int) -> str:
    """Return the path of the list of answers that were live between two times."""
    return build_path("/requests", {"from": formats.second(from_us), "to": formats.second(to_us)})


def life_rows(
    workers: Sequence[WorkerView],
    entries: Sequence[JournalEntry],
    window: HourWindow,
    stages: Sequence[str] = (),
) -> tuple[LifeRow, ...]:
    """Return the lives of processes in rows by role, at most `MAX_LANES` rows. A process is drawn
    behind one that ended before it began, so that a role has as many rows as processes lived at one
    time, at most `MAX_TRACKS`. The lives are of the listed workers, and of workers that only the
    journal still knows. Roles are in the order of `stages`, gateways last.
    """
    spans = _spans(workers, entries, window)
    places = {stage: place for place, stage in enumerate(stages)}
    roles = {role for role, *_ in spans}
    rows: list[LifeRow] = []
    for role in sorted(
        roles, key=lambda role: (role == "", places.get(stage_of(role), len(places)), role)
    ):
        name = role or GATEWAY_ROLE
        tracks: list[list[Life]] = []
        num_more = 0
        for of_role, worker, begin, end, how in spans:
            if of_role != role:
                continue
            life = _life(worker, begin, end, how, window)
            track = next((t for t in tracks if t[-1].end <= life.x), None)
            if track is not None:
                track.append(life)
            elif len(tracks) < MAX_TRACKS:
                tracks.append([life])
            else:
                num_more += 1
        for number, track in enumerate(tracks):
            last = number == len(tracks) - 1
            rows.append(
                LifeRow(
                    key=f"life-{name}-{number}",
                    role=name,
                    label=name if not number else "",
                    lives=tuple(track),
                    num_more=num_more if last else 0,
                )
            )
    return tuple(rows[:MAX_LANES])


Span = tuple[str, str, int, int, str]
"""A process: role ("" for a gateway), id, begin, end (0 while it lives), and how it ended or its
state.
"""


def _spans(
    workers: Sequence[WorkerView], entries: Sequence[JournalEntry], window: HourWindow
) -> list[Span]:
    """Return the processes that lived in the window, by their begin."""
    begun: dict[str, int] = {}
    ended: dict[str, JournalEntry] = {}
    roles: dict[str, str] = {}
    for entry in (entry for entry in entries if entry.worker):
        if entry.what == "joined":
            begun[entry.worker] = entry.at_us
        elif entry.what in ENDS:
            ended.setdefault(entry.worker, entry)
        else:
            continue
        roles[entry.worker] = entry.role
    known = {view.id for view in workers}
    spans: list[Span] = [
        (view.role, view.id, view.started_us, view.ended_us, view.state) for view in workers
    ]
    for worker, role in roles.items():
        if worker not in known and worker in ended:
            end = ended[worker]
            begin = begun.get(worker, window.from_us)
            spans.append((role, worker, begin, end.at_us, end.what))
    return sorted(
        (
            span
            for span in spans
            if span[2] < window.to_us and (not span[3] or span[3] > window.from_us)
        ),
        key=lambda span: (span[2], span[1]),
    )


def _life(worker: str, begin: int, end: int, how: str, window: HourWindow) -> Life:
    x = window.x(begin)
    since = f"since {formats.iso(begin)}" if begin > window.from_us else "since before this time"
    text = (
        f"{worker}: {how}, lived until {formats.iso(end)}, {since}"
        if end
        else f"{worker}: {how}, {since}"
    )
    return Life(
        worker=worker,
        x=x,
        width=round(max(window.x(end or window.to_us) - x, 0.1), 2),
        died=how in ("died", "lapsed"),
        text=text,
    )
