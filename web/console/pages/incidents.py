"""The list of incidents, and the page of one: its sentence, its time on one axis, the answers that
it touched, and what was logged. Reads what this host keeps where Redis has forgotten it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from fleet.core.errors import BadInput
from fleet.telemetry.incidents import AffectedAnswer, Alert, Incident
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import LogLine
from web.console.hour import HourWindow
from web.console.hour_charts import HourCharts
from web.console.hour_context import BandContext, draw_band
from web.console.page_context import LivePage, PageContext, Query, build_path
from web.gateway.gateway import Gateway
from web.gateway.incidents import IncidentRecord

MAX_ROWS, MAX_ANSWERS, MAX_DEATHS, MAX_LINES = 50, 100, 50, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentsContext(PageContext):
    """Data of the list of incidents, newest first. `older`: path of the following page, "" on the
    last one. `is_first`: True for the newest page. `kept_days`: number of days for which this host
    keeps incidents, 0 if it keeps none.
    """

    incidents: tuple[Incident, ...] = ()
    older: str = ""
    is_first: bool = True
    kept_days: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentContext(BandContext):
    """Data of the page of an incident; `incident` is None if the id is unknown. `answers`,
    `deaths`: the first of each, with the numbers of further ones; `lines`: log lines, newest first.
    `log_reaches`: True if the log reaches back to the beginning of the incident.
    """

    id: str = ""
    incident: Incident | None = None
    answers: tuple[AffectedAnswer, ...] = ()
    num_more_answers: int = 0
    deaths: tuple[JournalEntry, ...] = ()
    num_more_deaths: int = 0
    lines: tuple[LogLine, ...] = ()
    log_reaches: bool = False
    logs_path: str = ""
    alerts: tuple[Alert, ...] = ()
    kept_days: int = 0


def kept_days(gateway: Gateway) -> int:
    history = gateway.config.history
    return history.days if gateway.history.is_enabled else 0


class IncidentsPage(LivePage):
    key = active = "incidents"
    path = "/incidents"
    live = ("trouble", "incidents")
    context = IncidentsContext

    def empty(self, query: Query) -> IncidentsContext:
        return IncidentsContext(kept_days=kept_days(self._gateway))

    async def read(self, query: Query) -> IncidentsContext:
        before = query.get("before", "")
        if before and not (before.isdecimal() and len(before) <= 16):
            raise BadInput("before: it must be a time in microseconds since 1970", param="before")
        found = await self._gateway.incidents.newest(MAX_ROWS + 1, before_us=int(before or 0))
        shown = found[:MAX_ROWS]
        older = {"before": str(shown[-1].begin_us)} if len(found) > MAX_ROWS else {}
        return IncidentsContext(
            stream_query={"before": before},
            incidents=tuple(shown),
            older=build_path(self.path, older) if older else "",
            is_first=not before,
            kept_days=kept_days(self._gateway),
        )


class OneIncidentPage(LivePage):
    key = "incident"
    active = "incidents"
    path = "/incidents/{id}"
    live = ("trouble", "sentence", "hour", "recent", "answers", "deaths", "lines")
    context = IncidentContext

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._stages = tuple(stage.name for stage in gateway.graph.stages)

    def empty(self, query: Query) -> IncidentContext:
        name = query.get("id", "")
        return IncidentContext(stream_query={"id": name}, id=name)

    async def read(self, query: Query) -> IncidentContext:
        name = query.get("id", "")
        record = await self._gateway.incidents.read(name)
        if record is None:
            return IncidentContext(
                stream_query={"id": name},
                id=name,
                status=HTTPStatus.NOT_FOUND,
                kept_days=kept_days(self._gateway),
            )
        alerts = await self._gateway.client.alerts.read(record.incident.id)
        return self._build(record, tuple(alerts.values()))

    def _build(self, record: IncidentRecord, alerts: Sequence[Alert]) -> IncidentContext:
        incident = record.incident
        window = HourWindow.of(record.from_us, record.to_us)
        drawn = HourCharts(
            series=record.points, stages=self._stages, speaks=self._gateway.speaks, is_past=True
        )
        shown = [entry for entry in record.entries if window.from_us <= entry.at_us <= window.to_us]
        return IncidentContext(
            stream_query={"id": incident.id},
            id=incident.id,
            incident=incident,
            band=draw_band(window, drawn, shown, record.workers),
            answers=incident.answers[:MAX_ANSWERS],
            num_more_answers=len(incident.answers[MAX_ANSWERS:]),
            deaths=incident.deaths[:MAX_DEATHS],
            num_more_deaths=len(incident.deaths[MAX_DEATHS:]),
            lines=record.lines[: -MAX_LINES - 1 : -1],
            log_reaches=record.log_reaches,
            logs_path=build_path(
                "/logs", {"level": "warning", "before": f"{window.to_us // 1000}-0"}
            ),
            alerts=tuple(alerts),
        )
