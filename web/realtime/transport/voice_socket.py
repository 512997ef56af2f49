"""The two voice sockets, `WS /v1/realtime` and `WS /console/ws`: one session each, over different frames.

Knows no event but what opens and closes a session.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import QueryParams
from starlette.websockets import WebSocket

from fleet.core.errors import BadInput, FleetError, NotFound
from web.realtime.session import Session
from web.realtime.session_registry import Received, SessionRegistry
from web.realtime.transport.client_secrets import Credential, expired
from web.realtime.transport.refusal import close_code, close_reason, error_event
from web.realtime.transport.socket_writers import ConsolePort, SocketPort

GOODBYE = 1000
"""The client ends the session. Any other way it may come back: of a connection that breaks we are told 1005."""
MAX_EARLY_BYTES = 4 * 1024 * 1024
MAX_ALL_EARLY_BYTES = 64 * 1024 * 1024
"""Bound for all clients in line at this gateway together."""
FRAME_BYTES = 128
"""Memory of a frame beside its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the address asks for."""

    session: str | None
    received: Received

    @staticmethod
    def of(websocket: WebSocket) -> "Wanted":
        """Raises: BadInput."""
        query = websocket.query_params
        response, samples, chars = query.get("response") or None, _count(query, "samples"), _count(query, "chars")
        received = Received(response_id=response, samples=samples, chars=chars)
        return Wanted(session=query.get("session") or None, received=received)


def _count(query: QueryParams, name: str) -> int | None:
    """Raises: BadInput."""
    value = query.get(name)
    if value is None:
        return None
    if not (value.isdecimal() and len(value) < 12):
        raise BadInput(f"{name}: a whole number of {name} is expected", param=name)
    return int(value)


class VoiceSocket:
    """One connection, from its first frame to its last."""

    def __init__(
        self, hall: SessionRegistry, websocket: WebSocket, port: SocketPort, on_refused: Callable[[FleetError], FleetError]
    ) -> None:
        """`on_refused` is called with the error that ends the connection, and returns the one to send."""
        self._hall, self._websocket, self._port = hall, websocket, port
        self._on_refused = on_refused
        self._session: Session | None = None
        self._early: list[str | bytes] = []
        """What came while the client waited in line."""
        self._early_bytes = 0

    async def run(self, credential: Credential) -> None:
        entering = asyncio.create_task(self._enter(credential))
        code = 1006
        try:
            code = await self._read(entering)
        except FleetError as error:
            self._refuse(error)
        finally:
            await self._leave(entering, code)

    async def _enter(self, credential: Credential) -> Session:
        wanted = Wanted.of(self._websocket)
        if wanted.session is None:
            assert credential.settings is not None, "a secret that has expired names its session"
            return await self._hall.enter(self._port, credential.settings, credential.owner, self._port.position)
        try:
            return await self._hall.resume(wanted.session, self._port, wanted.received, credential.owner)
        except NotFound as error:
            # A secret without a session of that name is none: its bearer learns nothing of other sessions.
            raise error if credential.settings is not None else expired() from error

    async def _read(self, entering: asyncio.Task[Session]) -> int:
        """The close code. Raises: FleetError where there is no session for the client."""
        reading = asyncio.ensure_future(self._websocket.receive())
        try:
            while self._session is None:
                await asyncio.wait({reading, entering}, return_when=asyncio.FIRST_COMPLETED)
                if entering.done():
                    self._session = entering.result()
                    await self._take_early(self._session)
                elif reading.done():
                    message = reading.result()
                    if message["type"] == "websocket.disconnect":
                        return int(message.get("code") or 1005)
                    self._keep_early(message.get("text") or message.get("bytes") or "")
                    reading = asyncio.ensure_future(self._websocket.receive())
            message = await reading
            while message["type"] == "websocket.receive":
                await self._receive(self._session, message.get("text") or message.get("bytes") or "")
                # Frames that are there already come without a pause, and others have their turn too.
                await asyncio.sleep(0)
                message = await self._websocket.receive()
            return int(message.get("code") or 1005)
        finally:
            reading.cancel()

    def _keep_early(self, frame: str | bytes) -> None:
        num_bytes = FRAME_BYTES + len(frame)
        self._early_bytes += num_bytes
        self._hall.early_bytes += num_bytes
        if self._early_bytes > MAX_EARLY_BYTES or self._hall.early_bytes > MAX_ALL_EARLY_BYTES:
            raise BadInput("too much was sent before the session was created; wait for session.created")
        self._early.append(frame)

    async def _take_early(self, session: Session) -> None:
        frames = self._drop_early()
        for frame in frames:
            await self._receive(session, frame)
            await asyncio.sleep(0)

    def _drop_early(self) -> list[str | bytes]:
        frames, self._early = self._early, []
        self._hall.early_bytes -= self._early_bytes
        self._early_bytes = 0
        return frames

    async def _receive(self, session: Session, frame: str | bytes) -> None:
        session.num_received += 1
        if isinstance(frame, str):
            await session.receive(frame)
        elif isinstance(self._port, ConsolePort):
            await session.hear(frame)
        else:
            session.refuse(BadInput("binary frames are not read here; send input_audio_buffer.append"))

    def _refuse(self, error: FleetError) -> None:
        error = self._on_refused(error)
        self._port.tell(error_event(error))
        self._port.close(close_code(error), close_reason(error))

    async def _leave(self, entering: asyncio.Task[Session], code: int) -> None:
        self._drop_early()
        entering.cancel()
        await asyncio.wait({entering})
        if self._session is None and not entering.cancelled() and entering.exception() is None:
            self._session = entering.result()
        if self._session is not None:
            gone = self._hall.left if code == GOODBYE else self._hall.lost
            gone(self._session, self._port)
        await self._port.finish()
