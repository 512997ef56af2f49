"""Summaries of the live voice sessions of all gateways, for lists. Knows no socket."""

import msgspec

from fleet.history.sessions import TAIL_CHARS
from web.gateway.gateway import Gateway

HIDDEN = "sess_..."
"""Beginning of a session's id in logs and read-only lists, which show `TAIL_CHARS` of 22 random
characters; the hidden characters cannot be guessed.
"""


def shown_id(session_id: str) -> str:
    """Return the end of a session's id: enough to recognize the session, not enough to open it."""
    return f"{HIDDEN}{session_id[-TAIL_CHARS:]}"


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A live session, as the API and the console list it.

    `voice_to_voice_*_ms` are latencies of spoken turns, from the user's last voiced sample to the
    first voiced sample of the response. `created_us` and `seen_us` (the time of the last write) are
    microseconds since 1970.
    `state` is listening, hearing, thinking, speaking, interrupted, or away if no client is
    connected.
    `key` is the name of the API key that opened the session; None at a gateway without keys.
    `client_secret` contains the first characters of the hash of the client secret, created with
    that key, that opened the session; None for a session opened with the key itself.
    """

    id: str
    gateway: str
    state: str
    turns: int
    voice_to_voice_last_ms: float | None
    voice_to_voice_median_ms: float | None
    interruptions: int
    underruns: int
    input_rate_hz: int
    voice: str
    request_id: str | None
    created_us: int
    seen_us: int
    key: str | None = None
    client_secret: str | None = None


decode_view = msgspec.json.Decoder(SessionView).decode


async def read_views(gateway: Gateway) -> list[SessionView]:
    """Return the live sessions of all gateways, the newest first. A read-only gateway shows only
    the end of a session's id, since the whole id opens the session.

    Raises: RedisUnreachable.
    """
    views = [decode_view(raw) for raw in (await gateway.client.voice.views()).values()]
    if gateway.config.web.read_only:
        views = [msgspec.structs.replace(view, id=shown_id(view.id)) for view in views]
    return sorted(views, key=lambda view: -view.created_us)
