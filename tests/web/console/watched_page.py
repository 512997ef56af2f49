"""Live pages of the console, and fleet events that make them update."""

from collections.abc import Callable

from playwright.sync_api import Page

from fleet.core.clock import now_us
from fleet.core.events import WorkerLeft
from fleet.core.ids import WorkerId
from fleet.telemetry.views import FeedEntry
from tests.web.fake_telemetry import FakeTelemetry

REFUSED = "status of 409"
"""Text of the browser's log entry for a refused command, which tests of refusals expect: they check
the message that the page shows.
"""
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
OpenPage = Callable[[str], Page]
"""Type of the function that opens the console page at a path and waits until it is live."""


def publish_event(telemetry: FakeTelemetry) -> str:
    """Publish an event of the fleet and return its id."""
    entry = FeedEntry(
        id=f"{now_us() // 1000}-1", event=WorkerLeft(worker=WorkerId("w"), how="died")
    )
    telemetry.say(entry)
    return entry.id
