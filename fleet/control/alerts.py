"""Alerts about incidents in Redis: which gateway sends an alert, and what became of it. If that
gateway ends before it has sent the alert, another gateway sends it. Knows no HTTP.
"""

from collections.abc import Mapping
from typing import cast

import msgspec
from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import answer_of
from fleet.telemetry.incidents import ALERT_EVENTS, Alert, AlertEvent

KEPT_S = 14 * 86_400

_decode = msgspec.json.Decoder(Alert).decode


class AlertStore:
    """Store of the alerts, shared by all gateways. Any method may raise RedisUnreachable."""

    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def claim(self, incident: str, alert: Alert, lease_s: int) -> bool:
        """Claim the sending of an alert for `lease_s` seconds. Return False if another call has
        claimed the alert for now, or if the alert was sent or given up.
        """
        key = keys.alert(incident, alert.event)
        answer = self._redis.set(key, msgspec.json.encode(alert), nx=True, ex=lease_s)
        return bool(await answer_of(answer))

    async def end(self, incident: str, alert: Alert) -> None:
        """Record that a claimed alert was sent or given up (`alert.state`)."""
        key = keys.alert(incident, alert.event)
        await answer_of(self._redis.set(key, msgspec.json.encode(alert), ex=KEPT_S))

    async def read(self, incident: str) -> Mapping[AlertEvent, Alert]:
        """Return the alerts about an incident that are claimed, sent or given up, by event."""
        names = [keys.alert(incident, event) for event in ALERT_EVENTS]
        found = cast("list[bytes | None]", await answer_of(self._redis.mget(names)))
        return {
            event: _decode(raw)
            for event, raw in zip(ALERT_EVENTS, found, strict=True)
            if raw is not None
        }
