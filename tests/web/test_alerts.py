"""Alerts about incidents: each is sent once for a fleet, to a real HTTP server, with retries that
end.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from fleet.config.web_schema import AlertConfig
from fleet.core.ids import RoleName, WorkerId
from fleet.telemetry.incidents import GAP_US, id_of, utc
from fleet.telemetry.journal import JournalEntry
from tests.support import HttpHandler, await_until, serve_http
from tests.web.build import build
from tests.web.conftest import Loaded
from tests.web.fake_stores import FakeAlerts
from tests.web.fake_telemetry import FakeTelemetry
from web.fleet_api import alert_sender
from web.fleet_api.alert_sender import AlertSender, console_address
from web.gateway import incidents
from web.gateway.gateway import Gateway

SECOND = 1_000_000
BEGIN = 1_795_000_000 * SECOND
NAME = id_of(BEGIN)


@dataclass(slots=True)
class AlertReceiver:
    """Server that records the bodies it receives, and answers with the next of `statuses`, then
    204.
    """

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    statuses: list[int] = field(default_factory=list[int])

    def answer(self, handler: HttpHandler) -> None:
        assert handler.headers["content-type"] == "application/json"
        self.bodies.append(json.loads(handler.read_body()))
        handler.send(self.statuses.pop(0) if self.statuses else 200, b"")

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(body["event"], body["level"]) for body in self.bodies]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[AlertReceiver]:
    monkeypatch.setattr(alert_sender, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(alert_sender, "POLL_S", 0.01)
    found = AlertReceiver()
    with serve_http(found.answer) as url:
        found.url = f"{url}/secret-path"
        yield found


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Function that sets the time of the gateways, in seconds after `BEGIN`."""

    def set_time(seconds: float) -> None:
        monkeypatch.setattr(incidents, "now_us", lambda: BEGIN + round(seconds * SECOND))

    set_time(1)
    return set_time


def entry(what: str, at_s: float, **fields: object) -> JournalEntry:
    at_us = BEGIN + round(at_s * SECOND)
    given = {"worker": WorkerId("talker@host:1:a"), "role": RoleName("talker"), **fields}
    return build(JournalEntry, id=f"{at_us // 1000}-0", at_us=at_us, what=what, **given)


DEATH = entry("died", 0, detail="SIGKILL", serving=1)
LAST_DEATH = entry("died", 0, detail="SIGKILL", serving=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Senders:
    """Alert senders of two gateways of one fleet."""

    fleet: FakeTelemetry
    alerts: FakeAlerts
    each: tuple[AlertSender, ...]

    async def send_due(self) -> None:
        await asyncio.gather(*(sender.send_due() for sender in self.each))


def senders(loaded: Loaded, *entries: JournalEntry, **settings: object) -> Senders:
    alerts = AlertConfig.model_validate(
        {"after_s": 0, "console": "https://fleet.test/", **settings}
    )
    config = loaded.config.model_copy(update={"alerts": alerts})
    fleet, shared = FakeTelemetry(entries=list(entries)), FakeAlerts()
    each: list[AlertSender] = []
    for _ in range(2):
        client = loaded.fake_client()
        client.alerts = shared
        client.show(fleet)
        each.append(AlertSender(Gateway(config, client, loaded.frontend)))
    return Senders(fleet=fleet, alerts=shared, each=tuple(each))


@pytest.mark.usefixtures("at")
async def test_alert_is_sent_once_by_one_of_the_gateways(
    loaded: Loaded, receiver: AlertReceiver
) -> None:
    both = senders(loaded, entry("led", -GAP_US / SECOND), DEATH, webhook=receiver.url)
    for _ in range(3):
        await both.send_due()
    (body,) = receiver.bodies
    assert body == {
        "event": "opened",
        "incident": NAME,
        "fleet": "omni",
        "level": "degraded",
        "since": utc(BEGIN),
        "until": None,
        "sentence": f"Degraded since {utc(BEGIN)}: talker died (SIGKILL) at {utc(BEGIN)}.",
        "link": f"https://fleet.test/incidents/{NAME}",
        "text": f"{body['sentence']} {body['link']}",
    }
    assert both.alerts.known[NAME, "opened"].state == "sent"


async def test_worse_level_and_end_are_sent_once_each(
    loaded: Loaded, receiver: AlertReceiver, at: Callable[[float], None]
) -> None:
    both = senders(loaded, LAST_DEATH, webhook=receiver.url)
    await both.send_due()
    at(60)
    for _ in range(2):
        await both.send_due()
    both.fleet.entries.append(entry("joined", 70))
    at(70 + GAP_US / SECOND)
    for _ in range(2):
        await both.send_due()
    assert receiver.events == [("opened", "degraded"), ("worse", "down"), ("ended", "down")]
    assert receiver.bodies[-1]["until"] == utc(BEGIN + 70 * SECOND)


async def test_incident_that_was_over_before_anybody_watched_is_not_sent(
    loaded: Loaded, receiver: AlertReceiver, at: Callable[[float], None]
) -> None:
    at(GAP_US / SECOND)
    await senders(loaded, DEATH, webhook=receiver.url).send_due()
    assert not receiver.bodies


async def test_trouble_shorter_than_after_s_is_not_sent(
    loaded: Loaded, receiver: AlertReceiver, at: Callable[[float], None]
) -> None:
    both = senders(loaded, DEATH, webhook=receiver.url, after_s=30)
    at(300)
    await both.send_due()
    assert not receiver.bodies, "one death, long ago"
    both.fleet.entries.append(entry("died", 31, serving=1))
    await both.send_due()
    assert receiver.events == [("opened", "degraded")]


async def test_level_down_leaves_out_what_is_degraded(
    loaded: Loaded, receiver: AlertReceiver, at: Callable[[float], None]
) -> None:
    both = senders(loaded, LAST_DEATH, webhook=receiver.url, level="down")
    await both.send_due()
    assert not receiver.bodies
    at(60)
    await both.send_due()
    assert receiver.events == [("opened", "down")]


@pytest.mark.usefixtures("at")
async def test_refused_alert_is_sent_again(loaded: Loaded, receiver: AlertReceiver) -> None:
    receiver.statuses = [500, 302]
    both = senders(loaded, DEATH, webhook=receiver.url)
    await both.send_due()
    assert len(receiver.bodies) == 3
    assert both.alerts.known[NAME, "opened"].state == "sent"


@pytest.mark.usefixtures("at")
async def test_alert_that_is_never_accepted_is_given_up_and_logged_without_its_address(
    loaded: Loaded, receiver: AlertReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses = [500] * 9
    both = senders(loaded, DEATH, webhook=receiver.url)
    with caplog.at_level(logging.INFO, "fleet.web"):
        for _ in range(2):
            await both.send_due()
    assert len(receiver.bodies) == 3, "the first try and one after each pause"
    alert = both.alerts.known[NAME, "opened"]
    assert (alert.state, alert.detail) == ("failed", "127.0.0.1 answered 500")
    assert any("is given up: 127.0.0.1 answered 500" in line for line in caplog.messages)
    assert not any("secret-path" in line for line in caplog.messages)


@pytest.mark.usefixtures("at")
async def test_address_that_cannot_be_reached_is_given_up(
    loaded: Loaded, receiver: AlertReceiver
) -> None:
    both = senders(loaded, DEATH, webhook="http://127.0.0.1:9/nobody")
    await both.send_due()
    assert "cannot be reached" in both.alerts.known[NAME, "opened"].detail


@pytest.mark.usefixtures("at")
async def test_running_sender_sends_by_itself_and_stops(
    loaded: Loaded, receiver: AlertReceiver
) -> None:
    sender = senders(loaded, DEATH, webhook=receiver.url).each[0]
    sender.start()

    async def has_sent() -> bool:
        return bool(receiver.bodies)

    await await_until(has_sent, "the alert")
    await sender.stop()


async def test_sender_without_an_address_does_nothing(loaded: Loaded) -> None:
    both = senders(loaded, DEATH)
    both.each[0].start()
    await both.each[0].stop()
    assert not both.alerts.known


@pytest.mark.parametrize("url", ["ftp://host/x", "host/x", "http://", "https://a b/", "file:///x"])
def test_address_other_than_http_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="http:// or https://"):
        AlertConfig.model_validate({"webhook": url})


def test_links_have_the_address_of_the_console_or_of_the_gateway(loaded: Loaded) -> None:
    config = loaded.config
    assert console_address(config) == "http://localhost:8000"
    web = config.web.model_copy(update={"host": "10.0.0.7", "port": 80, "tls": "self-signed"})
    assert console_address(config.model_copy(update={"web": web})) == "https://10.0.0.7:80"
