"""Views of the live voice sessions of all gateways. Knows no socket."""

import msgspec

from web.gateway.gateway import Gateway

SHOWN_ID_CHARS = 8
"""Number of shown characters of the 22 random ones in a session's id; the others cannot be
guessed.
"""


def shown_id(session_id: str) -> str:
    """Return the end of a session's id: enough to recognise the session, not to open it."""
    return f"sess_...{session_id[-SHOWN_ID_CHARS:]}"


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A live session as the console shows it.

    `voice_to_voice_*_ms` are times from the user's last voiced sample to the response's first one,
    of spoken turns. `created_us` and `seen_us` count from 1970.
    `state`: listening, hearing, thinking, speaking, interrupted, or away without a client.
    `client_secret` has the first characters of the hash of the client secret that opened the
    session; None if a key did.
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
    client_secret: str | None = None


decode_view = msgspec.json.Decoder(SessionView).decode


async def read_views(gateway: Gateway) -> list[SessionView]:
    """Read the views, the newest first. A read-only gateway shows only the end of a session's id,
    since the whole id opens it.

    Raises: RedisUnreachable.
    """
    views = [decode_view(raw) for raw in (await gateway.client.voice.views()).values()]
    if gateway.config.web.read_only:
        views = [msgspec.structs.replace(view, id=shown_id(view.id)) for view in views]
    return sorted(views, key=lambda view: -view.created_us)
