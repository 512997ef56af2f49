"""One request: its outcome, timeline, text and audio, and its log lines.

Knows no stage by name.
"""

import shlex
from dataclasses import dataclass

from fleet.core.ids import CLIENT, request_id_of
from fleet.core.request_trace import LIVE_STATES, TaskTrace
from fleet.core.telemetry import LogLine, LogQuery
from web.console.page_context import LivePage, PageContext, Query
from web.console.waterfall import Waterfall, build_waterfall
from web.fleet_api.request_detail import RequestDetail, read_logs_without_audio, read_request_detail

NUM_LINES = 100
_KEY = '-H "Authorization: Bearer $FLEET_API_KEY"'
"""An unset variable is an empty key, which a fleet without a key ignores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioPlayer:
    """Units: seconds. `played_s` is None without a playback report. `stored`: the audio can still be played."""

    src: str
    total_s: float
    played_s: float | None
    underruns: int
    stored: bool

    @property
    def played_permille(self) -> int:
        return round(1000 * min((self.played_s or 0.0) / self.total_s, 1.0)) if self.total_s else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRequestContext(PageContext):
    """`detail` is None for an unknown request."""

    id: str
    detail: RequestDetail | None = None
    waterfall: Waterfall | None = None
    tasks: tuple[TaskTrace, ...] = ()
    player: AudioPlayer | None = None
    lines: tuple[LogLine, ...] = ()

    @property
    def live(self) -> bool:
        return self.detail is not None and self.detail.state in LIVE_STATES

    def curl(self, origin: str) -> str:
        """Return the request as a curl command for the server at `origin`, "" for an unknown request."""
        return build_curl_command(self.detail, origin) if self.detail is not None else ""

    @property
    def took_ms(self) -> float:
        detail = self.detail
        return 0.0 if detail is None else ((detail.ended_us or detail.now_us) - detail.created_us) / 1000


class OneRequestPage(LivePage):
    key = "request"
    active = "requests"
    path = "/requests/{id}"
    live = ("trouble", "summary", "lanes", "text", "tasks", "edges", "events", "log")

    def empty(self, query: Query) -> OneRequestContext:
        request = request_id_of(query["id"])
        return OneRequestContext(id=request, stream_query={"id": request})

    async def read(self, query: Query) -> OneRequestContext:
        """Raises: NotFound, RedisUnreachable."""
        request = request_id_of(query["id"])
        detail = await read_request_detail(self._gateway, request)
        logs = await read_logs_without_audio(self._gateway, detail)
        logged = await self._gateway.client.telemetry.logs(LogQuery(request=request), limit=NUM_LINES)
        return OneRequestContext(
            id=request,
            stream_query={"id": request},
            detail=detail,
            waterfall=build_waterfall(detail, self._gateway.graph, logs),
            tasks=tuple(task for task in detail.tasks if task.stage != CLIENT),
            player=await self._read_player(detail),
            lines=tuple(reversed(logged.lines)),
        )

    async def _read_player(self, detail: RequestDetail) -> AudioPlayer | None:
        edge = self._gateway.edges.audio
        if edge is None or not detail.audio_samples or not detail.audio_rate_hz:
            return None
        report = detail.playback
        return AudioPlayer(
            src=f"/v1/fleet/requests/{detail.id}/audio",
            total_s=detail.audio_samples / detail.audio_rate_hz,
            played_s=report.played_samples / detail.audio_rate_hz if report is not None else None,
            underruns=report.underruns if report is not None else 0,
            stored=await self._gateway.client.telemetry.has_edge_log(detail.id, edge),
        )


def build_curl_command(detail: RequestDetail, origin: str) -> str:
    """Return the request as a curl command: with its body if that is stored, else as a retry of the stored request."""
    if not detail.body:
        return f"curl -X POST {shlex.quote(f'{origin}/v1/fleet/requests/{detail.id}/retry')} {_KEY}"
    sent = f"-H 'Content-Type: application/json' \\\n  -d {shlex.quote(detail.body)}"
    return f"curl {shlex.quote(f'{origin}/v1/chat/completions')} {_KEY} \\\n  {sent}"
