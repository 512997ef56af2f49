"""Console pages in a real browser continue at another gateway after the first one has stopped."""

import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import msgspec
import pytest
from playwright.sync_api import Browser, Route, expect

from fleet.core.errors import RedisUnreachable
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.console.busy_gateway import fill, paths
from tests.web.fake_client import Script
from tests.web.voice.browsers import ask, visiting

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

LOST = ("Failed to load resource", "htmx:")
"""Beginnings of the browser's log messages when its gateway is gone."""
NUM_ATTEMPTS = 8
"""Retries within about five seconds."""
COUNT_ATTEMPTS = """() => {
  window.attempts = [];
  document.addEventListener("htmx:sse:before:connection", () => attempts.push(performance.now()));
}"""
DELAYS = """() => {
  const { connectTimeout, ...delays } = htmx.config.sse;
  return delays;
}"""
ANSWERED = "the second gateway answers, without Redis"


def replace_gateway(loaded: Loaded, first: ExitStack, gateway: ServedGateway) -> ExitStack:
    """Stop a gateway, and start a new one of the same fleet at its port."""
    first.close()
    second = ExitStack()
    second.enter_context(
        serving(loaded, client=gateway.client, port=urlsplit(gateway.url).port or 0)
    )
    return second


def test_live_pages_continue_at_another_gateway(browser: Browser, loaded: Loaded) -> None:
    with ExitStack() as stack:
        first = ExitStack()
        gateway = first.enter_context(serving(loaded))
        fill(gateway)
        shown = {
            "voice": "/",
            "workers": "/workers",
            "request": paths(gateway)["request"],
            "logs": "/logs",
        }
        pages = {
            name: stack.enter_context(visiting(browser, gateway.url + path, LOST))
            for name, path in shown.items()
        }
        for page in pages.values():
            expect(page.locator("#link")).to_have_text(
                "connected" if page is pages["voice"] else "live"
            )
        gateway.client.unreachable = RedisUnreachable(ANSWERED)
        stack.enter_context(replace_gateway(loaded, first, gateway))
        for page in pages.values():
            expect(page.locator("#trouble")).to_contain_text(ANSWERED)
        gateway.client.unreachable = None
        for page in pages.values():
            expect(page.get_by_text(ANSWERED)).to_have_count(0)


def test_page_cut_off_for_five_seconds_is_current_soon_after_the_return(
    browser: Browser, loaded: Loaded
) -> None:
    """A retry has at most 0.84 s from the one before, however long the outage."""
    with ExitStack() as stack:
        first = ExitStack()
        gateway = first.enter_context(serving(loaded))
        fill(gateway)
        page = stack.enter_context(visiting(browser, gateway.url + "/workers", LOST))
        expect(page.locator("#link")).to_have_text("live")
        page.evaluate(COUNT_ATTEMPTS)
        first.close()
        page.wait_for_function(f"() => window.attempts.length >= {NUM_ATTEMPTS}")
        waits = page.evaluate("() => window.attempts.slice(1).map((at, n) => at - attempts[n])")
        workers = gateway.client.telemetry.worker_list
        workers[0] = msgspec.structs.replace(workers[0], running=777)
        stack.enter_context(
            serving(loaded, client=gateway.client, port=urlsplit(gateway.url).port or 0)
        )
        returned_s = time.monotonic()
        expect(page.get_by_text("777/")).to_be_visible(timeout=10_000)
        print(f"{time.monotonic() - returned_s:.2f} s to the new value; retries (ms) {waits}")
        asked = page.evaluate(DELAYS)
        assert asked == {"reconnectDelay": 500, "reconnectMaxDelay": 700, "reconnectJitter": 0.2}


def test_pipeline_status_continues_at_another_gateway(browser: Browser, loaded: Loaded) -> None:
    with ExitStack() as stack:
        first = ExitStack()
        gateway = first.enter_context(serving(loaded))
        page = stack.enter_context(visiting(browser, gateway.url, LOST))
        expect(page.locator("#state")).to_have_text("Ready")
        gateway.client.script = Script(stall_at=6)
        ask(page)
        expect(page.locator("#edge-text .num")).to_have_text("3/3")
        stack.enter_context(replace_gateway(loaded, first, gateway))
        gateway.client.missing = ["talker"]
        expect(page.locator("#trouble")).to_contain_text("no worker of talker")
        expect(page.locator("#pipeline .shown-request")).to_contain_text(
            gateway.client.submitted[0][0].id
        )
        gateway.client.missing = []
        gateway.client.script = Script()
        ask(page, "and now?")
        expect(page.locator(".turn.assistant .words").last).to_have_text(Script().text)
        expect(page.locator("#pipeline .shown-request")).to_contain_text(
            gateway.client.submitted[-1][0].id
        )


def test_pipeline_status_follows_request_of_another_gateway(
    browser: Browser, loaded: Loaded
) -> None:
    with (
        serving(loaded) as first,
        serving(loaded, client=first.client) as second,
        visiting(browser) as page,
    ):
        page.route("**/console/events**", lambda route: redirect_route(route, first, second))
        page.goto(first.url)
        expect(page.locator("#state")).to_have_text("Ready")
        first.client.script = Script(stall_at=6)
        ask(page)
        expect(page.locator("#edge-text .num")).to_have_text("3/3")


def redirect_route(route: Route, here: ServedGateway, there: ServedGateway) -> None:
    route.continue_(url=route.request.url.replace(here.url, there.url))


@pytest.mark.parametrize(
    ("path", "stream"), [("/", "/console/events"), ("/workers", "/console/live/workers")]
)
def test_stream_connects_after_failed_attempts(
    browser: Browser, gateway: ServedGateway, path: str, stream: str
) -> None:
    fill(gateway)
    attempts: list[str] = []

    def fail_twice(route: Route) -> None:
        attempts.append(route.request.url)
        if len(attempts) == 1:
            route.fulfill(
                status=502, content_type="text/html", body="<p>the proxy found no gateway</p>"
            )
        elif len(attempts) == 2:
            route.abort("connectionrefused")
        else:
            route.continue_()

    with visiting(browser, expected=LOST) as page:
        page.route(f"**{stream}**", fail_twice)
        with page.expect_response(lambda answer: stream in answer.url and answer.status == 200):
            page.goto(gateway.url + path)
        gateway.client.unreachable = RedisUnreachable(ANSWERED)
        expect(page.locator("#trouble")).to_contain_text(ANSWERED)
        gateway.client.unreachable = None
        expect(page.get_by_text("the proxy found no gateway")).to_have_count(0)
    assert len(attempts) == 3
