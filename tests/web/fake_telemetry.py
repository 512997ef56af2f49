"""The fleet's state in memory, and commands to it. The state is empty until a test fills its lists
or uses `plausible.busy`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from fleet.control.telemetry.board import Telemetry
from fleet.control.telemetry.logs import checked_entry, says
from fleet.control.telemetry.series import NO_REQUEST
from fleet.control.telemetry.workers import drafts_of
from fleet.core.chunk import Chunk
from fleet.core.clock import now_us
from fleet.core.errors import BadInput, FleetError
from fleet.core.ids import (
    CLIENT,
    EdgeName,
    RequestId,
    RoleName,
    StageName,
    WorkerId,
)
from fleet.drafts.figures.speculation import OFF, StageDrafts
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.trace import (
    LIVE_STATES,
    STATES,
    FirstOutputs,
    PlaybackReport,
    RequestFilter,
    RequestPage,
    RequestRow,
    RequestTrace,
    SoundGaps,
    SpokenTurn,
    TaskBrief,
    matches,
)
from fleet.telemetry.views import (
    LEVELS,
    DeadLetterView,
    FeedEntry,
    Job,
    LogLine,
    LogPage,
    LogQuery,
    RoleQueue,
    RoleView,
    SeriesPoint,
    Transfers,
    WaitingClient,
    WorkerOrder,
    WorkerView,
)

Entry = TypeVar("Entry", LogLine, FeedEntry)


@dataclass(slots=True)
class FakeTelemetry(Telemetry):
    """Telemetry of a fleet in memory, as the gateway reads it. `say` appends feed entries and wakes
    the followers.
    """

    trouble: str = ""
    rows: list[RequestRow] = field(default_factory=list[RequestRow])
    traces: dict[str, RequestTrace] = field(default_factory=dict[str, RequestTrace])
    edge_logs: dict[tuple[str, str], list[Chunk]] = field(
        default_factory=dict[tuple[str, str], list[Chunk]]
    )
    worker_list: list[WorkerView] = field(default_factory=list[WorkerView])
    ended_long_ago: list[WorkerView] = field(default_factory=list[WorkerView])
    entries: list[JournalEntry] = field(default_factory=list[JournalEntry])
    refusals: list[FleetError] = field(default_factory=list[FleetError])
    queue_list: list[RoleQueue] = field(default_factory=list[RoleQueue])
    role_list: list[RoleView] = field(default_factory=list[RoleView])
    waiting: list[WaitingClient] = field(default_factory=list[WaitingClient])
    letters: list[DeadLetterView] = field(default_factory=list[DeadLetterView])
    transfer_view: Transfers = Transfers(edges=(), workers=())
    points: list[SeriesPoint] = field(default_factory=list[SeriesPoint])
    lines: list[LogLine] = field(default_factory=list[LogLine])
    dropped: int = 0
    job_list: list[Job] = field(default_factory=list[Job])
    feed: list[FeedEntry] = field(default_factory=list[FeedEntry])
    heard: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    turns: dict[str, SpokenTurn] = field(default_factory=dict[str, SpokenTurn])
    gaps: dict[str, SoundGaps] = field(default_factory=dict[str, SoundGaps])
    exporters: dict[str, WorkerId] = field(default_factory=dict[str, WorkerId])
    rtfs: list[float] = field(default_factory=list[float])
    orders: list[tuple[str, WorkerOrder]] = field(default_factory=list[tuple[str, WorkerOrder]])
    ordered_by: list[str] = field(default_factory=list[str])
    scaled: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])
    retried: list[str] = field(default_factory=list[str])
    redelivered: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    chosen_drafters: dict[str, str] = field(default_factory=dict[str, str])
    underruns: int = 0
    check_reachable: Callable[[], None] = lambda: None
    workers_of: Callable[[], list[WorkerView]] = list[WorkerView]
    missing_of: Callable[[], list[RoleName]] = list[RoleName]
    traces_of: Callable[[], Mapping[str, RequestTrace]] = dict[str, RequestTrace]
    on_retry: Callable[[RequestId, RequestId], bool] = lambda _request, _again: False
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_followed(self) -> bool:
        """True once somebody has followed the events."""
        return self._loop is not None

    def say(self, *entries: FeedEntry) -> None:
        """Append feed entries from any thread; followers wake in the gateway's thread."""
        self.feed += entries
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()

    async def list_requests(
        self, wanted: RequestFilter, *, before: str = "", limit: int = 50
    ) -> RequestPage:
        self.check_reachable()
        if wanted.state and wanted.state not in STATES:
            raise BadInput(
                f"state: no state {wanted.state!r}; use one of {', '.join(STATES)}", param="state"
            )
        rows = sorted(self._all_rows(), key=lambda row: row.id, reverse=True)
        found = [
            row
            for row in rows
            if (not before or row.id < before) and matches(row, wanted, now_us())
        ]
        of_any_state = msgspec.structs.replace(wanted, state="")
        matching = Counter(row.state for row in rows if matches(row, of_any_state, now_us()))
        counts = {state: matching[state] for state in STATES}
        shown = found[:limit]
        return RequestPage(
            rows=tuple(shown),
            next=shown[-1].id if len(found) > limit else "",
            counts=counts,
            now_us=now_us(),
        )

    async def trace(self, request: RequestId) -> RequestTrace | None:
        self.check_reachable()
        trace = self.traces.get(request) or self.traces_of().get(request)
        if trace is None:
            return None
        turn, gaps = self.turns.get(request, trace.turn), self.gaps.get(request, trace.gaps)
        return msgspec.structs.replace(trace, turn=turn, gaps=gaps)

    async def first_outputs(self, request: RequestId) -> FirstOutputs:
        self.check_reachable()
        return FirstOutputs(claimed_us=None, first_us={})

    async def num_live(self) -> int:
        self.check_reachable()
        return sum(row.state in LIVE_STATES for row in self._all_rows())

    def _all_rows(self) -> list[RequestRow]:
        """Return the request rows that the test has set, and a row for each request submitted to
        the fake client.
        """
        known = {row.id for row in self.rows}
        return [
            *self.rows,
            *(row_of(trace) for trace in list(self.traces_of().values()) if trace.id not in known),
        ]

    async def edge_log(self, request: RequestId, edge: EdgeName) -> Sequence[Chunk]:
        self.check_reachable()
        return self.edge_logs.get((request, edge), [])

    async def has_edge_log(self, request: RequestId, edge: EdgeName) -> bool:
        return bool(await self.edge_log(request, edge))

    async def record_playback(
        self, request: RequestId, *, played_samples: int, underruns: int
    ) -> None:
        self.check_reachable()
        self.heard.append((request, played_samples, underruns))
        if request in self.traces:
            trace = self.traces[request]
            report = PlaybackReport(
                played_samples=played_samples, underruns=underruns, at_us=now_us()
            )
            before = (trace.playback,) if trace.playback is not None else ()
            self.traces[request] = msgspec.structs.replace(
                trace, playback=report, earlier_playback=(*trace.earlier_playback, *before)
            )

    async def record_turn(self, request: RequestId, *, voiced_end_us: int, decided_us: int) -> None:
        self.check_reachable()
        self.turns[request] = SpokenTurn(voiced_end_us=voiced_end_us, decided_us=decided_us)

    async def record_gaps(self, request: RequestId, gaps: SoundGaps) -> None:
        self.check_reachable()
        self.gaps[request] = gaps

    async def claim_export(self, request: RequestId, gateway: WorkerId) -> bool:
        self.check_reachable()
        is_known = request in self.traces or request in self.traces_of()
        if not is_known or request in self.exporters:
            return False
        self.exporters[request] = gateway
        return True

    def record_underruns(self, count: int) -> None:
        self.underruns += count

    def record_rtf(self, rtf: float) -> None:
        self.rtfs.append(rtf)

    def record_refusal(self, error: FleetError, request: RequestId = NO_REQUEST) -> None:
        self.refusals.append(error)

    def redis_trouble(self) -> str:
        return self.trouble

    async def drafts(self) -> list[StageDrafts]:
        self.check_reachable()
        return [
            StageDrafts(
                stage=StageName("thinker"),
                configured=OFF,
                chosen=self.chosen_drafters.get("thinker", ""),
                workers=drafts_of(StageName("thinker"), self.worker_list),
            )
        ]

    async def workers(self, *, with_gone: bool = False) -> list[WorkerView]:
        self.check_reachable()
        return [
            view for view in self.worker_list or self.workers_of() if with_gone or not view.gone
        ]

    async def worker(self, worker: WorkerId) -> WorkerView | None:
        known = [*self.ended_long_ago, *await self.workers(with_gone=True)]
        return next((view for view in known if view.id == worker), None)

    async def journal(
        self, *, since_us: int = 0, until_us: int = 0, limit: int = 1000, what: Collection[str] = ()
    ) -> list[JournalEntry]:
        self.check_reachable()
        found = [
            entry
            for entry in sorted(self.entries, key=lambda entry: entry.at_us)
            if since_us <= entry.at_us <= (until_us or entry.at_us)
            and (not what or entry.what in what)
        ]
        return found[-limit:]

    async def rows_of(self, requests: Sequence[RequestId]) -> list[RequestRow]:
        self.check_reachable()
        return [row for row in self._all_rows() if row.id in requests]

    async def roles(self) -> list[RoleView]:
        self.check_reachable()
        return self.role_list

    async def missing_roles(self) -> list[RoleName]:
        self.check_reachable()
        served = {view.role for view in self.worker_list if view.takes_tasks}
        lost = {
            RoleName(view.role)
            for view in self.worker_list
            if view.gone and view.role not in ("", *served)
        }
        return sorted({*self.missing_of(), *lost})

    async def queues(self) -> list[RoleQueue]:
        self.check_reachable()
        return self.queue_list

    async def waiting_clients(self) -> list[WaitingClient]:
        self.check_reachable()
        return self.waiting

    async def dead_letters(self) -> list[DeadLetterView]:
        self.check_reachable()
        return self.letters

    async def transfers(self) -> Transfers:
        self.check_reachable()
        return self.transfer_view

    async def series(self) -> list[SeriesPoint]:
        self.check_reachable()
        return self.points

    async def logs(self, wanted: LogQuery, *, before: str = "", limit: int = 200) -> LogPage:
        self.check_reachable()
        if wanted.level and wanted.level not in LEVELS:
            raise BadInput(
                f"level: no level {wanted.level!r}; use one of {', '.join(LEVELS)}", param="level"
            )
        before = checked_entry(before, "before") if before else ""
        lines = sorted(self.lines, key=lambda line: line.id, reverse=True)
        found = [line for line in lines if (not before or line.id < before) and says(line, wanted)]
        return LogPage(
            lines=tuple(found[:limit]),
            next=found[limit - 1].id if len(found) > limit else "",
            newest=lines[0].id if lines else "0-0",
            dropped=self.dropped,
        )

    def follow_logs(self, wanted: LogQuery, *, after: str = "") -> AsyncGenerator[LogLine, None]:
        return self._follow(lambda: [line for line in self.lines if says(line, wanted)], after)

    def follow_events(self, *, after: str = "") -> AsyncGenerator[FeedEntry, None]:
        return self._follow(lambda: self.feed, after)

    async def _follow(
        self, entries: Callable[[], list[Entry]], after: str
    ) -> AsyncGenerator[Entry, None]:
        """Yield entries after the entry id `after`, or from now on if it is empty, without end."""
        known = after or max((entry.id for entry in entries()), default="")
        self._loop = asyncio.get_running_loop()
        while True:
            self.check_reachable()
            woken = self._woken
            for entry in [entry for entry in entries() if entry.id > known]:
                known = entry.id
                yield entry
            await woken.wait()


def row_of(trace: RequestTrace) -> RequestRow:
    tasks = [task for task in trace.tasks if task.stage != CLIENT]
    return RequestRow(
        id=trace.id,
        state=trace.state,
        kind=trace.kind,
        model=trace.model,
        created_us=trace.created_us,
        ended_us=trace.ended_us,
        code=trace.code,
        error=trace.error or "",
        session=trace.session,
        tasks=tuple(
            TaskBrief(stage=task.stage, state=task.state, worker=task.owner) for task in tasks
        ),
        first_us={
            edge.name: edge.first_us
            for edge in trace.edges
            if edge.name in trace.outputs and edge.first_us
        },
    )
