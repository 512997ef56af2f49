"""GET /v1/fleet/requests/{id}/stream: resume a streamed answer after the loss of its gateway or
connection. Knows no stage.
"""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.ids import RequestId, request_id_of
from web.fleet_api.request_detail import check_owner, request_not_found
from web.gateway.answer import Position
from web.gateway.gateway import Gateway
from web.http.disconnect import is_stalled, until_disconnect
from web.http.errors import ReadOnly
from web.http.sse import send_stream
from web.openai.chat import ChatEnvelope, chat_events


class ResumeEndpoint:
    """`GET /v1/fleet/requests/{id}/stream`: the chat completion's events after `Last-Event-ID`, or
    all events without this header. A raw ASGI app, so that a client disconnect cancels the request.

    The latest connection receives the answer. An older connection gets no further events, and
    closing it no longer aborts the request. Keys without the scope `operate` resume only their own
    answers.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        # Starlette accepts HEAD for every GET route; it would take the answer from its client
        if request.method != "GET":
            raise HTTPException(405, headers={"allow": "GET"})
        if self._gateway.config.web.read_only:
            raise ReadOnly(
                "reading an answer's stream takes it from its listener, and this gateway is "
                "read-only (web.read_only)"
            )
        sent = Position.parse(request.headers.get("last-event-id", str(Position())))
        await until_disconnect(
            receive,
            self._resume(request_id_of(str(request.path_params["request_id"])), sent, scope, send),
        )

    async def _resume(
        self, request_id: RequestId, sent: Position, scope: Scope, send: Send
    ) -> None:
        await check_owner(self._gateway, request_id)
        answer = await self._gateway.resume(request_id)
        if answer is None:
            raise request_not_found(request_id)
        async with answer:
            answer.is_stalled = lambda: is_stalled(scope)
            reply = ChatEnvelope.of(answer.spec, self._gateway)
            await send_stream(
                send, {}, chat_events(self._gateway, reply, answer, sent, with_ids=True)
            )
