"""Client secrets (`ek_...`): short-lived keys with which a web page opens voice sessions. The
page's server creates them with an API key, and they are accepted only as long as that key is.

Only the hash of a secret is stored, in Redis for all gateways. Knows no socket.
"""

import time
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_urlsafe
from typing import Annotated, Literal

import msgspec
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from web.gateway.gateway import Gateway
from web.http.body import read_body
from web.http.callers import ANYONE, ApiCaller, caller_of
from web.http.errors import Unauthorized
from web.http.guard import CLIENT_SECRET_PREFIX
from web.http.json_response import json_response
from web.http.key_ring import KeyRing
from web.http.offload import parse_body
from web.realtime.protocol.capabilities import default_settings
from web.realtime.protocol.client_events import bad_field
from web.realtime.protocol.server_events import new_id
from web.realtime.protocol.session_update import served_settings
from web.realtime.protocol.settings import Patch, SessionPatch, Settings
from web.realtime.protocol.transcription_session import SessionBody, session_body
from web.schema.chat import read_json
from web.schema.fields.realtime import SECRET

DEFAULT_S, MIN_S, MAX_S = 600, 10, 7200
MAX_BODY_BYTES = 256 * 1024
NO_KEY = ""
"""Owner name of the sessions of a gateway without API keys. Otherwise the owner name is the name of
the API key, also for sessions of the console.
"""
OF_SECRET = "/"
"""Separator in the owner name of sessions that were opened with a client secret: name of the API
key that created the secret, this separator, hash of the secret.
"""
SHOWN_CHARS = 8


class ExpiresAfter(Patch):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=MIN_S, le=MAX_S)] = DEFAULT_S


class SecretBody(Patch):
    expires_after: ExpiresAfter | None = None
    session: SessionPatch | None = None


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    value: str
    expires_at: int
    session: SessionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """Credential of a client. `owner` is the client's name in the records of the sessions that it
    opens, and `settings` the initial settings of these sessions. `settings` is None if the secret
    has expired or never existed; the client can then only continue a session that the secret opened
    before. `caller`: the API key whose limits apply.
    """

    owner: str
    settings: Settings | None
    caller: ApiCaller


class StoredSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A client secret as Redis has it. `key_id`: id of the API key that created it."""

    settings: Settings
    key_id: str


_decoder = msgspec.msgpack.Decoder(StoredSecret)


class Secrets:
    def __init__(self, gateway: Gateway, keys: KeyRing) -> None:
        self._gateway = gateway
        self._keys = keys

    async def create(self, request: Request) -> Response:
        """Answer POST /v1/realtime/client_secrets: create a client secret. The secret contains the
        name of its API key if the key is in `web.keys_file`.
        """
        caller = caller_of(request.scope) or ANYONE
        body = await parse_body(_parse, await read_body(request, MAX_BODY_BYTES))
        settings = default_settings(self._gateway)
        if body.session is not None:
            settings = served_settings(self._gateway, settings, body.session)
        settings = msgspec.structs.replace(settings, id=new_id("sess"))
        seconds = body.expires_after.seconds if body.expires_after is not None else DEFAULT_S
        secret = Secret(
            value=CLIENT_SECRET_PREFIX
            + (f"{caller.listed_name}." if caller.listed_name else "")
            + token_urlsafe(24),
            expires_at=int(time.time()) + seconds,
            session=session_body(settings),
        )
        await self._gateway.client.voice.save_secret(
            _name(secret.value),
            msgspec.msgpack.encode(StoredSecret(settings=settings, key_id=caller.key_id)),
            seconds,
        )
        return json_response(secret, headers={"cache-control": "no-store"})

    async def credential(self, key: str) -> Credential:
        """Return the credential of a client secret. Raises: Unauthorized if the API key that has
        created it is no longer accepted for this; RedisUnreachable.
        """
        raw = await self._gateway.client.voice.secret(_name(key))
        stored = _decoder.decode(raw) if raw is not None else None
        maker = key.removeprefix(CLIENT_SECRET_PREFIX).rpartition(".")[0]
        caller = self._keys.maker_of(maker, stored.key_id if stored is not None else None)
        if caller is None or not caller.may("talk"):
            raise expired()
        return Credential(
            owner=caller.name + OF_SECRET + _name(key),
            settings=stored.settings if stored is not None else None,
            caller=caller.in_session(),
        )


def _parse(raw: bytes) -> SecretBody:
    """Parse the body of a request for a client secret. Raises: BadInput, InputTooLarge,
    UnsupportedValue.
    """
    try:
        body = SecretBody.model_validate(read_json(raw or b"{}"))
    except ValidationError as error:
        raise bad_field(error, "the body") from error
    SECRET.check(body)
    return body


def _name(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def expired() -> Unauthorized:
    return Unauthorized(
        "the client secret is unknown or has expired; create another at /v1/realtime/client_secrets"
    )


def is_of_secret(owner: str) -> bool:
    """Return True for the owner name of a client secret's sessions."""
    return OF_SECRET in owner


def key_name(owner: str) -> str | None:
    """Return the name of the API key in an owner name; None without keys."""
    return owner.partition(OF_SECRET)[0] or None


def short_name(owner: str) -> str | None:
    """Return the first characters of the client secret's hash in an owner name, for lists; None for
    the owner name of an API key.
    """
    return owner.partition(OF_SECRET)[2][:SHOWN_CHARS] or None
