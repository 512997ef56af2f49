"""The Voice page: conversation with the model, beside the live status of the pipeline."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId, request_id_of
from web.console.charts import find_last
from web.console.live_pages import format_message
from web.console.pipeline_status import read_pipeline_status
from web.console.refresh import wait_for_any
from web.console.shell import build_shell, find_origin
from web.console.templating import Templates
from web.gateway.gateway import Gateway
from web.http.disconnect import until_disconnect
from web.http.guard import csrf_of
from web.http.sse import send_stream
from web.realtime.protocol.settings import ServerVad

BUSY_S, IDLE_S = 0.25, 1.0
"""Seconds between two readings of the pipeline's status: `BUSY_S` while the shown request runs,
otherwise `IDLE_S`.
"""
LIVE_BLOCKS = ("speech", "glance", "pipeline")
"""Names of the page's live template blocks, and ids of their elements."""


class VoicePage:
    def __init__(self, gateway: Gateway, templates: Templates) -> None:
        self._gateway = gateway
        self._templates = templates

    async def show(self, request: Request) -> Response:
        gateway = self._gateway
        html = self._templates.render(
            "voice.html",
            shell=build_shell(gateway, csrf_of(request.scope), "talk", find_origin(request)),
            model=gateway.model,
            graph=gateway.graph,
            voices=gateway.frontend.voices(),
            examples=gateway.frontend.examples(),
            speaks=gateway.speaks,
            rate_hz=gateway.frontend.sample_rate_hz,
            calls_functions=bool(gateway.call_format),
            detection=ServerVad(),
            first_sound_ms=await self._first_sound_ms(),
            pipeline=await read_pipeline_status(gateway, None),
        )
        return HTMLResponse(html, headers={"cache-control": "no-store"})

    async def _first_sound_ms(self) -> float | None:
        """Return the last measured median time to the first sound; None if unknown."""
        try:
            series = await self._gateway.client.telemetry.series()
        except FleetError:
            return None
        values = [point.first_audio_p50_ms for point in series]
        return find_last(values, [point.at_us for point in series])[0]


class PipelineStatusEvents:
    """`GET /console/events?request=`: the pipeline's status as server-sent HTML, with an event per
    change.

    The address names the request to show, so that any gateway can continue the stream of another
    gateway.
    """

    def __init__(self, gateway: Gateway, templates: Templates) -> None:
        self._gateway = gateway
        self._templates = templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = Request(scope).query_params.get("request", "")
        await until_disconnect(
            receive, send_stream(send, {}, self._changes(request_id_of(shown) if shown else None))
        )

    async def _changes(self, shown: RequestId | None) -> AsyncIterator[bytes]:
        last, number, closing = dict[str, str](), 0, self._gateway.closing
        while not closing.is_set():
            pipeline = await read_pipeline_status(self._gateway, shown)
            blocks = {
                name: self._templates.render_block("voice.html", name, pipeline=pipeline)
                for name in LIVE_BLOCKS
            }
            if blocks != last:
                number += 1
                last = blocks
                yield format_message(str(number), blocks)
            await wait_for_any(BUSY_S if pipeline.busy else IDLE_S, closing)
