"""Views of the live voice sessions of all gateways, as this gateway shows them. Knows no socket."""

import msgspec

from web.gateway.gateway import Gateway
from web.realtime.story import SessionView, shown_id

decode_view = msgspec.json.Decoder(SessionView).decode


async def read_views(gateway: Gateway) -> list[SessionView]:
    """The newest first. The whole id of a session opens it, so a gateway that is read-only shows only its end.

    Raises: RedisUnreachable.
    """
    views = [decode_view(raw) for raw in (await gateway.client.voice.views()).values()]
    if gateway.config.web.read_only:
        views = [msgspec.structs.replace(view, id=shown_id(view.id)) for view in views]
    return sorted(views, key=lambda view: -view.created_us)
