"""A browser for each test module, and a page over a busy fleet."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.web.chromium import chromium_path
from tests.web.conftest import ServedGateway
from tests.web.console.busy_gateway import fill
from tests.web.console.watched_page import ARGS, complaints_of, watched


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, gateway: ServedGateway) -> Iterator[Callable[[str], Page]]:
    """Opens pages over a busy fleet. Errors in the browser (a blocked script, an exception) fail the test."""
    fill(gateway)
    page = watched(browser)

    def go(path: str) -> Page:
        page.goto(gateway.url + path)
        expect(page.locator("#link")).to_have_text("live")
        return page

    yield go
    page.close()
    assert not complaints_of(page), complaints_of(page)
