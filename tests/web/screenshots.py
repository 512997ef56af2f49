"""`python -m tests.web.screenshots DIR`: every page of the console, light and dark, on a phone and on a desk, as PNG files.

Over a gateway whose fleet is made up; nothing else has to run.
"""

import sys
import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect, sync_playwright

from fleet.core.errors import RedisUnreachable
from tests.web.chromium import chromium_path
from tests.web.conftest import Gateway, load, serving
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.pages.catalogue import fill, paths

SIZES = {"phone": (390, 844), "desk": (1440, 900)}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox", "--disable-gpu"])
        loaded = load(Path(scratch))
        with serving(loaded) as gateway:
            fill(gateway)
            for name, path in {**paths(gateway), "voice": "/"}.items():
                shoot_all(browser, gateway, name, path, folder)
            _without_data(browser, gateway, folder)
        with serving(loaded, api_key="secret") as gateway:
            shoot_all(browser, gateway, "login", "/console/login", folder)
        browser.close()


def _without_data(browser: Browser, gateway: Gateway, folder: Path) -> None:
    gateway.client.tell(FakeTelemetry())
    gateway.client.missing = [gateway.config.graph_declaration().stages[1].name]
    for name in ("overview", "requests", "jobs"):
        shoot_all(browser, gateway, f"{name}-empty", f"/{name}", folder)
    gateway.client.unreachable = RedisUnreachable("Redis does not answer (Connection refused)")
    shoot_all(browser, gateway, "overview-away", "/overview", folder)


def shoot_all(browser: Browser, gateway: Gateway, name: str, path: str, folder: Path) -> None:
    for size, (width, height) in SIZES.items():
        for scheme in SCHEMES:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(gateway.url + path)
            _settle(page)
            file = folder / f"{name}-{size}-{scheme}.png"
            page.screenshot(path=str(file), full_page=True, timeout=60_000)
            page.close()
            print(file)


def _settle(page: Page) -> None:
    """Until the page is connected, where it is one that connects."""
    if page.locator("#live").count():
        expect(page.locator("#link")).to_have_text("live")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
