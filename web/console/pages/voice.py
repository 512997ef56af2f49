"""The Voice page: conversation with the model, beside the live status of the pipeline."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from fleet.core.ids import RequestId, request_id_of
from web.console.live_pages import format_event
from web.console.pipeline_status import read_pipeline_status
from web.console.refresh import wait_for_any
from web.console.shell import build_shell, find_origin
from web.console.templating import Templates
from web.gateway.gateway import Gateway
from web.http.disconnect import until_disconnect
from web.http.guard import csrf_of
from web.http.sse import send_stream

BUSY_S, IDLE_S = 0.25, 1.0
"""Seconds between two readings of the pipeline's status: `BUSY_S` while the shown request runs,
otherwise `IDLE_S`.
"""


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
            pipeline=await read_pipeline_status(gateway, None),
        )
        return HTMLResponse(html, headers={"cache-control": "no-store"})


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
        last, number, closing = "", 0, self._gateway.closing
        while not closing.is_set():
            pipeline = await read_pipeline_status(self._gateway, shown)
            html = self._templates.render("pipeline_status.html", pipeline=pipeline)
            if html != last:
                number += 1
                last = html
                yield format_event(str(number), html)
            await wait_for_any(BUSY_S if pipeline.busy else IDLE_S, closing)
