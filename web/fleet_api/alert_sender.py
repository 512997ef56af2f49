"""Alerts: messages about incidents to the address `alerts.webhook`. Every gateway watches the
incidents; an alert is sent by the first gateway that claims it.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx2
import msgspec

from fleet.config import FleetConfig
from fleet.config.safety import is_loopback
from fleet.core.clock import now_us
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import WorkerId
from fleet.process.background import keep_running
from fleet.process.lan_address import EVERYWHERE
from fleet.telemetry.incidents import Alert, AlertEvent, Incident, sentence_of, utc
from web.gateway.gateway import Gateway

log = logging.getLogger("fleet.web")

POLL_S = 5.0
TIMEOUT_S = 10.0
PAUSES_S = (1.0, 5.0, 15.0, 60.0)
"""Pauses between the tries to send an alert; after the last try it is given up."""
LEASE_S = 180
"""Time for which an alert is claimed: all tries take 131 s. Afterwards another gateway may claim
the alert, since the first one may have ended.
"""
NUM_WATCHED = 3
"""Number of the newest incidents for which alerts are sent."""


class AlertBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an alert. `event`: opened, worse or ended. `incident`: id of the incident, the same
    in all alerts about it. `fleet`: name of the model. `level`: degraded or down. `since`, `until`:
    times in UTC; `until` is null while the incident goes on. `link`: address of the incident's
    page. `text`: sentence and link, as chat systems show it.
    """

    event: AlertEvent
    incident: str
    fleet: str
    level: str
    since: str
    until: str | None
    sentence: str
    link: str
    text: str


class AlertSender:
    """Background task of one gateway, from `start` to `stop`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._settings = gateway.config.alerts
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._settings.webhook is not None:
            self._task = keep_running(self._watch, "the sending of alerts")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                await self.send_due()
            except RedisUnreachable as error:
                log.info("incidents cannot be read for alerts: %s", error.message)
            await asyncio.sleep(POLL_S)

    async def send_due(self) -> None:
        """Claim and send the alerts that are due and that no other gateway has claimed; record
        whether each was sent. Raises: RedisUnreachable.
        """
        for incident in (await self._gateway.incidents.from_journal())[:NUM_WATCHED]:
            for event in await self._due(incident):
                await self._send(incident, event)

    async def _due(self, incident: Incident) -> Sequence[AlertEvent]:
        alerts = await self._gateway.client.alerts.read(incident.id)
        opened = alerts.get("opened")
        if opened is None:
            is_due = incident.is_open and self._is_worth_it(incident)
            return ("opened",) if is_due else ()
        due: list[AlertEvent] = []
        if incident.level == "down" and opened.level != "down" and "worse" not in alerts:
            due.append("worse")
        if not incident.is_open and "ended" not in alerts:
            due.append("ended")
        return due

    def _is_worth_it(self, incident: Incident) -> bool:
        lasted_us = incident.last_us - incident.begin_us
        is_bad = incident.level == "down" or self._settings.level == "degraded"
        return is_bad and lasted_us >= self._settings.after_s * 1e6

    async def _send(self, incident: Incident, event: AlertEvent) -> None:
        store = self._gateway.client.alerts
        gateway = WorkerId(self._gateway.client.id)
        alert = Alert(event=event, level=incident.level, gateway=gateway, at_us=now_us())
        if not await store.claim(incident.id, alert, LEASE_S):
            return
        why = await post(str(self._settings.webhook), self._body(incident, event))
        if why:
            log.warning("alert %s of incident %s is given up: %s", event, incident.id, why)
        ended = msgspec.structs.replace(
            alert, state="failed" if why else "sent", at_us=now_us(), detail=why
        )
        await store.end(incident.id, ended)

    def _body(self, incident: Incident, event: AlertEvent) -> AlertBody:
        sentence = sentence_of(incident)
        link = f"{console_address(self._gateway.config)}/incidents/{incident.id}"
        return AlertBody(
            event=event,
            incident=incident.id,
            fleet=self._gateway.model,
            level=incident.level,
            since=utc(incident.begin_us),
            until=utc(incident.end_us) if incident.end_us is not None else None,
            sentence=sentence,
            link=link,
            text=f"{sentence} {link}",
        )


def console_address(config: FleetConfig) -> str:
    """Return the address of the console for links, without a slash at its end."""
    if config.alerts.console is not None:
        return config.alerts.console.rstrip("/")
    host = config.web.host
    if host in EVERYWHERE:
        host = socket.gethostname()
    elif is_loopback(host):
        host = "localhost"
    return f"{config.web.scheme}://{f'[{host}]' if ':' in host else host}:{config.web.port}"


async def post(url: str, body: AlertBody) -> str:
    """Send a body as JSON, in several tries. Return why it was given up; "" if it was accepted with
    a status from 200 to 299. The text names the host only: the rest of an address may be a secret.
    """
    async with httpx2.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False) as http:
        for pause_s in PAUSES_S:
            if not (why := await _try(http, url, body)):
                return ""
            log.info("an alert is sent again in %g s: %s", pause_s, why)
            await asyncio.sleep(pause_s)
        return await _try(http, url, body)


async def _try(http: httpx2.AsyncClient, url: str, body: AlertBody) -> str:
    host, content = urlsplit(url).hostname, msgspec.json.encode(body)
    try:
        answer = await http.post(url, content=content, headers={"content-type": "application/json"})
    except httpx2.HTTPError as error:
        return f"{host} cannot be reached ({type(error).__name__})"
    return "" if answer.is_success else f"{host} answered {answer.status_code}"
