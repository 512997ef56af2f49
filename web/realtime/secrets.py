"""Short-lived client keys (`ek_...`): made with the API key by a server, used by its page to open one kind of session.

A key's hash is kept where every gateway finds it. Knows no socket.
"""

import time
from hashlib import sha256
from secrets import token_urlsafe
from typing import Annotated, Literal

import msgspec
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from fleet.core.errors import BadInput
from web.connection import read_body
from web.errors import Unauthorized, UnsupportedValue
from web.gateway import Gateway
from web.guard import EPHEMERAL
from web.realtime.settings import VOICE_FIELD, Patch, SessionPatch, Settings, merged

DEFAULT_S, MIN_S, MAX_S = 600, 10, 7200
MAX_BODY_BYTES = 256 * 1024


class ExpiresAfter(Patch):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=MIN_S, le=MAX_S)] = DEFAULT_S


class SecretBody(Patch):
    expires_after: ExpiresAfter | None = None
    session: SessionPatch | None = None


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    value: str
    expires_at: int
    session: Settings


_decoder = msgspec.msgpack.Decoder(Settings)


class Secrets:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """POST /v1/realtime/client_secrets."""
        body = _parse(await read_body(request, MAX_BODY_BYTES))
        settings = default_settings(self._gateway)
        if body.session is not None:
            settings = merged(settings, body.session)
            self._gateway.frontend.voice(settings.audio.output.voice or None, VOICE_FIELD)
        seconds = body.expires_after.seconds if body.expires_after is not None else DEFAULT_S
        secret = Secret(value=EPHEMERAL + token_urlsafe(24), expires_at=int(time.time()) + seconds, session=settings)
        await self._gateway.client.keep_secret(_name(secret.value), msgspec.msgpack.encode(settings), seconds)
        return Response(msgspec.json.encode(secret), media_type="application/json", headers={"cache-control": "no-store"})

    async def settings_of(self, key: str) -> Settings:
        """What the session of a short-lived key begins with. Raises: Unauthorized."""
        raw = await self._gateway.client.secret(_name(key))
        if raw is None:
            raise Unauthorized("the client secret is unknown or has expired; make another at /v1/realtime/client_secrets")
        return _decoder.decode(raw)


def default_settings(gateway: Gateway) -> Settings:
    settings = Settings(model=gateway.model)
    if not gateway.speaks:
        return msgspec.structs.replace(settings, output_modalities=("text",))
    output = msgspec.structs.replace(settings.audio.output, voice=gateway.frontend.voice(None))
    return msgspec.structs.replace(settings, audio=msgspec.structs.replace(settings.audio, output=output))


def _parse(raw: bytes) -> SecretBody:
    """Raises: BadInput, UnsupportedValue."""
    try:
        return SecretBody.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(piece) for piece in first["loc"])
        if where == "session.type":
            raise UnsupportedValue("session.type: only realtime is served", param=where) from error
        raise BadInput(f"{where or 'the body'}: {first['msg'].removeprefix('Value error, ')}", param=where or None) from error


def _name(key: str) -> str:
    return sha256(key.encode()).hexdigest()
