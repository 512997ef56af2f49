"""Fixtures of the console's tests: a browser for each test module, and pages over a busy fake
fleet.
"""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.web.chromium import chromium_path
from tests.web.conftest import ServedGateway
from tests.web.console.busy_gateway import fill
from tests.web.console.watched_page import ARGS, REFUSED, OpenPage
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.voice.browsers import visiting


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), headless=True, args=ARGS
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, gateway: ServedGateway) -> Iterator[OpenPage]:
    """Function that opens a console page over a busy fleet. Browser errors (a blocked script, an
    exception) fail the test.
    """
    fill(gateway)
    with visiting(browser, expected=(REFUSED,), viewport={"width": 1280, "height": 800}) as page:

        def go(path: str) -> Page:
            page.goto(gateway.url + path)
            expect(page.locator("#link")).to_have_text("live")
            return page

        yield go


@pytest.fixture
def telemetry(open_page: OpenPage, gateway: ServedGateway) -> FakeTelemetry:
    """Fake telemetry of the busy fleet, which a test changes while a page is open."""
    return gateway.client.telemetry
