"""One request: what became of it, where its time went, its words and its sound, and what every process said of it.

Knows no stage by name.
"""

import shlex
from dataclasses import dataclass

from fleet.core.ids import CLIENT, RequestId
from fleet.core.request_trace import LIVE_STATES, EdgeTrace, TaskTrace, TraceEvent
from fleet.core.telemetry import LogLine, LogQuery
from web.console.page_context import PageContext, Query, assign_colours, stream_path
from web.console.waterfall import Waterfall, build_waterfall
from web.fleet_api.request_detail import RequestDetail, read_logs_without_audio, read_request_detail
from web.gateway.gateway import Gateway

NUM_LINES = 100
_KEY = '-H "Authorization: Bearer $FLEET_API_KEY"'
"""An unset key is an empty one, which a fleet without a key does not look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioPlayer:
    """Units: seconds. `heard_s` None: no player has said what it played. `share` of the sound that was heard, in thousandths.

    `kept`: the sound can still be played.
    """

    src: str
    made_s: float
    heard_s: float | None
    underruns: int
    kept: bool

    @property
    def share(self) -> int:
        return round(1000 * min((self.heard_s or 0.0) / self.made_s, 1.0)) if self.made_s else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRequestContext(PageContext):
    """`told` is None where the request is not known."""

    id: str
    told: RequestDetail | None
    waterfall: Waterfall | None
    tasks: tuple[TaskTrace, ...] = ()
    edges: tuple[EdgeTrace, ...] = ()
    marks: tuple[TraceEvent, ...] = ()
    colours: dict[str, int]
    sound: AudioPlayer | None = None
    lines: tuple[LogLine, ...] = ()

    @property
    def live(self) -> bool:
        return self.told is not None and self.told.state in LIVE_STATES

    def curl(self, origin: str) -> str:
        """Return the request as a command for the server at `origin`; empty where the request is not known."""
        return build_curl_command(self.told, origin) if self.told is not None else ""

    @property
    def took_ms(self) -> float:
        told = self.told
        return 0.0 if told is None else ((told.ended_us or told.now_us) - told.created_us) / 1000


class OneRequestPage:
    key = "request"
    active = "requests"
    path = "/requests/{id}"
    template = "request.html"
    live = ("trouble", "summary", "lanes", "words", "tasks", "edges", "marks", "log")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._colours = assign_colours(gateway.graph)

    def empty(self, query: Query) -> OneRequestContext:
        return OneRequestContext(
            title=query["id"],
            id=query["id"],
            stream=stream_path(self.key, {"id": query["id"]}),
            told=None,
            waterfall=None,
            colours=self._colours,
        )

    async def read(self, query: Query) -> OneRequestContext:
        """Raises: NotFound, RedisUnreachable."""
        request = RequestId(query["id"])
        told = await read_request_detail(self._gateway, request)
        logs = await read_logs_without_audio(self._gateway, told)
        logged = await self._gateway.client.telemetry.logs(LogQuery(request=request), limit=NUM_LINES)
        return OneRequestContext(
            title=request,
            id=request,
            stream=stream_path(self.key, {"id": request}),
            told=told,
            waterfall=build_waterfall(told, self._gateway.graph, logs, self._colours),
            tasks=tuple(task for task in told.tasks if task.stage != CLIENT),
            edges=told.edges,
            marks=told.marks,
            colours=self._colours,
            sound=await self._sound(told),
            lines=tuple(reversed(logged.lines)),
        )

    async def _sound(self, told: RequestDetail) -> AudioPlayer | None:
        edge = self._gateway.edges.audio
        if edge is None or not told.audio_samples or not told.audio_rate_hz:
            return None
        heard = told.heard
        return AudioPlayer(
            src=f"/v1/fleet/requests/{told.id}/audio",
            made_s=told.audio_samples / told.audio_rate_hz,
            heard_s=heard.played_samples / told.audio_rate_hz if heard is not None else None,
            underruns=heard.underruns if heard is not None else 0,
            kept=await self._gateway.client.telemetry.has_edge_log(told.id, edge),
        )


def build_curl_command(told: RequestDetail, origin: str) -> str:
    """Return the request as a command: with the body that was sent, where it was kept, else as a retry of the kept request."""
    if not told.body:
        return f"curl -X POST {shlex.quote(f'{origin}/v1/fleet/requests/{told.id}/retry')} {_KEY}"
    sent = f"-H 'Content-Type: application/json' \\\n  -d {shlex.quote(told.body)}"
    return f"curl {shlex.quote(f'{origin}/v1/chat/completions')} {_KEY} \\\n  {sent}"
