"""Reader of a refused WebSocket connection: one error event, then a close with a code and a
reason.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.web.conftest import ServedGateway
from tests.web.realtime.openai_types import check_event
from web.realtime.transport.refusal import MAX_REASON_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Refusal of a WebSocket connection as its client sees it. `error`: the `error` object of the
    event that precedes the close.
    """

    error: dict[str, Any]
    close_code: int | None
    close_reason: str
    subprotocol: str | None


async def refusal_of(gateway: ServedGateway, path: str = "/v1/realtime", **options: Any) -> Refusal:
    """Connect to the gateway, read until the close, and return the refusal. Raises: AssertionError
    if anything but one error event arrives.
    """
    async with connect(gateway.url.replace("http", "ws") + path, **options) as socket:
        events = await _events(socket)
        assert [event["type"] for event in events] == ["error"], events
        check_event(events[0])
        reason = socket.close_reason or ""
        assert len(reason.encode()) <= MAX_REASON_BYTES
        return Refusal(
            error=events[0]["error"],
            close_code=socket.close_code,
            close_reason=reason,
            subprotocol=socket.subprotocol,
        )


async def _events(socket: ClientConnection) -> list[dict[str, Any]]:
    """Return all events that arrive before the close."""
    events: list[dict[str, Any]] = []
    with suppress(ConnectionClosed):
        while True:
            events.append(json.loads(await asyncio.wait_for(socket.recv(), 20)))
    return events
