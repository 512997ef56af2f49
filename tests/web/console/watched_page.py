"""Pages whose browser errors are collected, and events of the fleet that make them update."""

from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from fleet.core.events import WorkerLeft
from fleet.core.ids import WorkerId
from fleet.core.telemetry import FeedEntry
from tests.web.fake_telemetry import FakeTelemetry, now_us

ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PATIENCE_MS = 20_000
expect.set_options(timeout=PATIENCE_MS)


_complaints: dict[int, list[str]] = {}


def watched(browser: Browser) -> Page:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(PATIENCE_MS)
    found = _complaints.setdefault(id(page), [])

    def on_console(message: ConsoleMessage) -> None:
        # the browser also logs refused commands; their tests check the message that the page shows
        if message.type == "error" and "status of 409" not in message.text:
            found.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: found.append(str(error)))
    return page


def complaints_of(page: Page) -> list[str]:
    return _complaints[id(page)]


def publish_event(telemetry: FakeTelemetry) -> str:
    """Publish an event of the fleet and return its id."""
    entry = FeedEntry(id=f"{now_us() // 1000}-1", event=WorkerLeft(worker=WorkerId("w"), how="died"))
    telemetry.say(entry)
    return entry.id
