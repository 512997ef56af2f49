"""The fleet's incidents, as a gateway reads them: found in the journal, which is read once and then
followed, and together with what this host keeps of them. Knows no page.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from fleet.config import FleetConfig
from fleet.core.clock import now_us
from fleet.history.incidents import KeptIncident
from fleet.telemetry.incidents import GAP_US, Incident, JournalView, find_incidents, time_of
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import (
    LEVELS,
    SERIES_KEPT_S,
    SERIES_STEP_S,
    LogLine,
    LogQuery,
    SeriesPoint,
    WorkerView,
)
from web.gateway.fleet_port import FleetPort
from web.gateway.history import AnswerHistory

MAX_ENTRIES = 20_000
"""Limit of journal entries held in memory, equal to the number that Redis keeps."""
LINES_PER_READ, MAX_READS, MAX_LINES = 500, 4, 200
"""Limits of the log lines of an incident: lines per read, number of reads, and warnings and errors
that are kept, the latest ones.
"""
MAX_POINTS = SERIES_KEPT_S // SERIES_STEP_S
MAX_WORKERS = 200
MARGIN_US = 60_000_000
"""Microseconds before and after an incident that its page also shows."""
T = TypeVar("T")


class IncidentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An incident, with what the fleet recorded from `from_us` to `to_us`, the time that its page
    shows. All lists are in order of time.

    `entries`: journal entries of the incident and of some time before and after. `journal_from_us`:
    time of the oldest journal entry when the record was made. `lines`: warnings and errors of the
    log. `log_reaches`: True if the log reaches back to `from_us`. `points`: consecutive steps of
    the time series. `workers`: processes of that time.
    """

    incident: Incident
    entries: tuple[JournalEntry, ...]
    to_us: int
    journal_from_us: int = 0
    lines: tuple[LogLine, ...] = ()
    log_reaches: bool = False
    points: tuple[SeriesPoint, ...] = ()
    workers: tuple[WorkerView, ...] = ()

    @property
    def from_us(self) -> int:
        return self.incident.begin_us - MARGIN_US


_encode = msgspec.msgpack.encode
_decode_record = msgspec.msgpack.Decoder(IncidentRecord).decode
_decode_summary = msgspec.msgpack.Decoder(Incident).decode


class IncidentReader:
    """Reader of the incidents for one gateway. Any method may raise RedisUnreachable."""

    def __init__(self, client: FleetPort, config: FleetConfig, history: AnswerHistory) -> None:
        self._client, self._history = client, history
        self._needed = tuple(role.name for role in config.roles() if not role.optional)
        self._patience_us = int(config.lease.no_worker_timeout_s * 1e6)
        self._entries: list[JournalEntry] = []
        self._kept_states: dict[str, tuple[int, int | None]] = {}
        self._reading = asyncio.Lock()

    async def from_journal(self) -> list[Incident]:
        """Return the incidents in the journal, newest first."""
        entries = await self._follow()
        return self._find(entries, entries[0].at_us if entries else 0)

    async def current(self) -> Incident | None:
        """Return the incident that has not ended, or None."""
        newest = next(iter(await self.from_journal()), None)
        return newest if newest is not None and newest.is_open else None

    async def newest(self, limit: int, *, before_us: int = 0) -> list[Incident]:
        """Return at most `limit` incidents, from the journal and from this host's file, newest
        first. `before_us`: only incidents that began earlier; 0 for all.
        """
        found = {one.begin_us: one for one in await self.from_journal()}
        for row in await self._history.incidents(limit, before_us=before_us):
            kept = _decode_summary(row.summary)
            same = next((one for one in found.values() if _overlap(one, kept)), None)
            if same is None:
                found[kept.begin_us] = kept
            elif kept.begin_us < same.begin_us:  # the journal has lost its begin
                del found[same.begin_us]
                found[kept.begin_us] = msgspec.structs.replace(
                    kept, end_us=same.end_us, last_us=same.last_us
                )
        begins = sorted((at for at in found if not before_us or at < before_us), reverse=True)
        return [found[at] for at in begins[:limit]]

    async def read(self, incident: str) -> IncidentRecord | None:
        """Return the record of an incident; None if there is none. `incident`: an id, which is a
        time; the incident that was going on at that time is returned.
        """
        at_us = time_of(incident)
        if at_us is None:
            return None
        kept = await self._kept(at_us)
        if kept is not None and not kept.incident.is_open:
            return kept
        entries = await self._follow()
        from_us = entries[0].at_us if entries else 0
        if kept is not None:
            entries = _merged((*kept.entries, *entries), lambda entry: entry.id)
            from_us = min(kept.journal_from_us, from_us or kept.journal_from_us)
        found = next((one for one in self._find(entries, from_us) if one.has(at_us)), None)
        return None if found is None else await self._record(found, entries, from_us, kept)

    async def keep(self, incident: Incident) -> None:
        """Write the record of an incident to this host's file, unless the same state is kept
        already. An incident that is kept with its end is not written again.
        """
        state = (incident.last_us, incident.end_us)
        if self._kept_states.get(incident.id) == state:
            return
        kept = await self._kept(incident.begin_us)
        is_final = kept is not None and not kept.incident.is_open
        record = None if is_final else await self.read(incident.id)
        if record is None:
            self._kept_states[incident.id] = state
            return
        summary = msgspec.structs.replace(record.incident, answers=(), deaths=())
        row = KeptIncident(
            id=record.incident.id,
            begin_us=record.incident.begin_us,
            summary=_encode(summary),
            record=await asyncio.to_thread(_encode, record),
        )
        if await self._history.keep_incident(row):
            self._kept_states[incident.id] = state

    def _find(self, entries: Sequence[JournalEntry], from_us: int) -> list[Incident]:
        newest_us = entries[-1].at_us if entries else 0
        return find_incidents(
            JournalView(
                entries=entries,
                now_us=max(now_us(), newest_us),
                from_us=from_us,
                needed=self._needed,
                patience_us=self._patience_us,
            )
        )

    async def _follow(self) -> Sequence[JournalEntry]:
        """Return the journal. Only entries that are newer than the entries in memory are read from
        Redis. If Redis does not have the last known entry, the journal was replaced and is read
        from its beginning.
        """
        async with self._reading:
            last = self._entries[-1].id if self._entries else ""
            since_us = int(last.partition("-")[0]) * 1000 if last else 0
            found = await self._client.telemetry.journal(since_us=since_us, limit=MAX_ENTRIES)
            ids = [entry.id for entry in found]
            if last in ids:
                self._entries += found[ids.index(last) + 1 :]
                del self._entries[:-MAX_ENTRIES]
            else:
                missed = last and await self._client.telemetry.journal(limit=MAX_ENTRIES)
                self._entries = list(missed or found)
            return tuple(self._entries)

    async def _kept(self, at_us: int) -> IncidentRecord | None:
        """Return the kept record of the incident that was going on at `at_us`, or None."""
        for row in await self._history.incidents(1, before_us=at_us + 1_000_000):
            if _decode_summary(row.summary).has(at_us):
                found = await self._history.incident(row.id)
                return _decode_record(found.record) if found is not None else None
        return None

    async def _record(
        self,
        incident: Incident,
        entries: Sequence[JournalEntry],
        from_us: int,
        kept: IncidentRecord | None,
    ) -> IncidentRecord:
        telemetry = self._client.telemetry
        around = [
            entry
            for entry in entries
            if incident.begin_us - GAP_US <= entry.at_us <= incident.last_us + GAP_US
        ]
        to_us = now_us() if incident.is_open else incident.last_us
        bare = IncidentRecord(
            incident=incident,
            entries=tuple(around),
            to_us=to_us + MARGIN_US,
            journal_from_us=from_us,
        )
        lines, reaches = await self._read_lines(bare)
        points = await telemetry.series()
        workers = [
            view
            for view in await telemetry.workers(with_gone=True)
            if view.started_us < bare.to_us and (not view.gone or view.ended_us > bare.from_us)
        ]
        if kept is not None:
            lines, points = [*kept.lines, *lines], [*kept.points, *points]
            workers = [*kept.workers, *workers]
        return msgspec.structs.replace(
            bare,
            lines=tuple(_merged(lines, lambda line: line.id))[-MAX_LINES:],
            log_reaches=reaches or (kept is not None and kept.log_reaches),
            points=_consecutive([p for p in points if bare.from_us <= p.at_us <= bare.to_us]),
            workers=tuple({view.id: view for view in workers}.values())[:MAX_WORKERS],
        )

    async def _read_lines(self, record: IncidentRecord) -> tuple[list[LogLine], bool]:
        """Return the warnings and errors that the log still has of the record's time, and whether
        the log reaches back to the beginning of that time.
        """
        found: list[LogLine] = []
        before = f"{record.to_us // 1000}-0"
        for _ in range(MAX_READS):
            page = await self._client.telemetry.logs(
                LogQuery(), before=before, limit=LINES_PER_READ
            )
            found += [line for line in page.lines if line.at_us >= record.from_us]
            reaches = any(line.at_us < record.from_us for line in page.lines)
            if reaches or not page.next:
                return _warnings(found), reaches
            before = page.next
        return _warnings(found), False


def _warnings(lines: Iterable[LogLine]) -> list[LogLine]:
    least = LEVELS.index("warning")
    return [line for line in lines if LEVELS.index(line.level) >= least]


def _overlap(one: Incident, other: Incident) -> bool:
    return one.begin_us <= other.last_us and other.begin_us <= one.last_us


def _merged(items: Iterable[T], id_of: Callable[[T], str]) -> list[T]:
    """Return items in the order of their ids, each id once. The ids are ids of Redis stream
    entries; the last of several items with one id is returned.
    """
    by_id = {id_of(item): item for item in items}
    return [by_id[one] for one in sorted(by_id, key=lambda one: [*map(int, one.split("-"))])]


def _consecutive(points: Iterable[SeriesPoint]) -> tuple[SeriesPoint, ...]:
    """Return the time series from the first of the points to the last, each step once. A step that
    no gateway or worker counted is a point of zeros.
    """
    known: dict[int, SeriesPoint] = {}
    for point in points:
        if point.at_us not in known or point != SeriesPoint(at_us=point.at_us):
            known[point.at_us] = point
    if not known:
        return ()
    steps = range(min(known), max(known) + 1, SERIES_STEP_S * 1_000_000)
    return tuple(known.get(at, SeriesPoint(at_us=at)) for at in steps)[-MAX_POINTS:]
