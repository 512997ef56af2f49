"""Socket of one voice client, `WS /v1/realtime` or `WS /console/ws`: the same session with
different frames.

Knows no event except the events that open and close a session.
"""

import asyncio
from collections.abc import Callable

from starlette.datastructures import QueryParams
from starlette.websockets import WebSocket

from fleet.core.errors import BadInput, FleetError, NotFound
from web.realtime.session import Session
from web.realtime.session_registry import Received, SessionRegistry
from web.realtime.transport.client_connection import ClientWriter
from web.realtime.transport.client_secrets import Credential, expired
from web.realtime.transport.refusal import close_code, close_reason, error_event
from web.realtime.transport.socket_writers import ConsoleWriter, SocketWriter

NORMAL_CLOSURE = 1000
"""Close code with which the client ends the session. After any other code the client may reconnect;
a connection that breaks is reported as 1005.
"""
MAX_EARLY_BYTES = 4 * 1024 * 1024
MAX_ALL_EARLY_BYTES = 64 * 1024 * 1024
"""Limit of the stored frames of all queued clients of this gateway together."""
FRAME_BYTES = 128
"""Memory that a stored frame takes in addition to its content."""


def _count(query: QueryParams, name: str) -> int | None:
    """Return a query parameter as a number, None if it is absent. Raises: BadInput."""
    value = query.get(name)
    if value is None:
        return None
    if not (value.isdecimal() and len(value) < 12):
        raise BadInput(f"{name}: a whole number of {name} is expected", param=name)
    return int(value)


async def open_session(
    registry: SessionRegistry,
    writer: ClientWriter,
    credential: Credential,
    query: QueryParams,
    on_position: Callable[[int], None],
) -> Session:
    """Open a session, or resume the one that the query names. `on_position` is called with each new
    position in the queue.

    Raises: BadInput, and the errors of `SessionRegistry.enter` and `resume`.
    """
    session_id, samples, chars = (
        query.get("session"),
        _count(query, "samples"),
        _count(query, "chars"),
    )
    if not session_id:
        assert credential.settings is not None, "a secret that has expired names its session"
        return await registry.enter(writer, credential.settings, credential.owner, on_position)
    try:
        received = Received(response_id=query.get("response") or None, samples=samples, chars=chars)
        return await registry.resume(session_id, writer, received, credential.owner)
    except NotFound as error:
        # A secret that expired and has no such session is refused as unknown: its bearer learns of
        # no other session.
        raise error if credential.settings is not None else expired() from error


class VoiceSocket:
    """A client's connection to a voice session: opens or resumes the session, and passes the
    client's frames to it.
    """

    def __init__(
        self,
        registry: SessionRegistry,
        websocket: WebSocket,
        writer: SocketWriter,
        on_refused: Callable[[FleetError], FleetError],
    ) -> None:
        """Create the connection; `run` serves it.

        `on_refused` is called with an error that ends the connection, and returns the error to
        send.
        """
        self._registry = registry
        self._websocket = websocket
        self._writer = writer
        self._on_refused = on_refused
        self._session: Session | None = None
        self._early: list[str | bytes] = []
        """Frames received before the client was admitted."""
        self._early_bytes = 0

    async def run(self, credential: Credential) -> None:
        entering = asyncio.create_task(
            open_session(
                self._registry,
                self._writer,
                credential,
                self._websocket.query_params,
                self._writer.send_position,
            )
        )
        code = 1006
        try:
            code = await self._read(entering)
        except FleetError as error:
            self._refuse(error)
        finally:
            await self._leave(entering, code)

    async def _read(self, entering: asyncio.Task[Session]) -> int:
        """Read and handle frames until the client disconnects; return the close code. `entering` is
        the task that opens the session; frames are stored until it ends.

        Raises: FleetError if the session cannot be opened.
        """
        reading = asyncio.ensure_future(self._websocket.receive())
        try:
            while not entering.done():
                await asyncio.wait({reading, entering}, return_when=asyncio.FIRST_COMPLETED)
                if entering.done():
                    break
                message = reading.result()
                if message["type"] == "websocket.disconnect":
                    return int(message.get("code") or 1005)
                self._store_early(message.get("text") or message.get("bytes") or "")
                reading = asyncio.ensure_future(self._websocket.receive())
            self._session = entering.result()
            for frame in self._drop_early():
                await self._receive(self._session, frame)
                await asyncio.sleep(0)
            message = await reading
            while message["type"] == "websocket.receive":
                await self._receive(
                    self._session, message.get("text") or message.get("bytes") or ""
                )
                # Frames that have arrived are read without a pause, so let other tasks run.
                await asyncio.sleep(0)
                message = await self._websocket.receive()
            return int(message.get("code") or 1005)
        finally:
            reading.cancel()

    def _store_early(self, frame: str | bytes) -> None:
        num_bytes = FRAME_BYTES + len(frame)
        self._early_bytes += num_bytes
        self._registry.early_bytes += num_bytes
        if self._early_bytes > MAX_EARLY_BYTES or self._registry.early_bytes > MAX_ALL_EARLY_BYTES:
            raise BadInput(
                "too much was sent before the session was created; wait for session.created"
            )
        self._early.append(frame)

    def _drop_early(self) -> list[str | bytes]:
        frames, self._early = self._early, []
        self._registry.early_bytes -= self._early_bytes
        self._early_bytes = 0
        return frames

    async def _receive(self, session: Session, frame: str | bytes) -> None:
        session.num_frames += 1
        if isinstance(frame, str):
            await session.receive(frame)
        elif isinstance(self._writer, ConsoleWriter):
            await session.receive_audio(frame)
        else:
            session.send_error(
                BadInput("binary frames are not read here; send input_audio_buffer.append")
            )

    def _refuse(self, error: FleetError) -> None:
        error = self._on_refused(error)
        self._writer.send(error_event(error))
        self._writer.close(close_code(error), close_reason(error))

    async def _leave(self, entering: asyncio.Task[Session], code: int) -> None:
        self._drop_early()
        entering.cancel()
        await asyncio.wait({entering})
        if self._session is None and not entering.cancelled() and entering.exception() is None:
            self._session = entering.result()
        if self._session is not None:
            on_end = self._registry.on_closed if code == NORMAL_CLOSURE else self._registry.on_lost
            on_end(self._session, self._writer)
        await self._writer.finish()
