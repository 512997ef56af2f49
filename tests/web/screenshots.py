"""`python -m tests.web.screenshots DIR`: every page of the console, light and dark, on a phone and on a desk, as PNG files.

Over gateways whose fleets are made up: a busy one, an empty one, one without Redis, one at its limits, and for the Voice page a
double that speaks; nothing else has to run. `--only NAME` draws the pages whose names begin so.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect, sync_playwright

from fleet.core.errors import RedisUnreachable
from tests.web.chromium import chromium_path
from tests.web.conftest import Gateway, Loaded, load, serving
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.pages.catalogue import LIVE_PAGES, fill, paths, read_only
from tests.web.pages.crowd import crowd
from tests.web.voice import screenshots as voice

SIZES = {"phone": (390, 844), "desk": (1440, 900)}
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
MAX_HEIGHT = 4000
"""Of a picture; a list goes on below it as it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Camera:
    """`only`: pages whose names do not begin so are left out."""

    browser: Browser
    folder: Path
    only: str

    def shoot(self, gateway: Gateway, name: str, path: str, schemes: Sequence[Scheme] = SCHEMES) -> None:
        for size in SIZES if name.startswith(self.only) else ():
            for scheme in schemes:
                self._shoot(gateway.url + path, f"{name}-{size}-{scheme}.png", size, scheme)

    def _shoot(self, url: str, name: str, size: str, scheme: Scheme) -> None:
        width, height = SIZES[size]
        page = self.browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(url)
        _settle(page)
        tall = int(page.evaluate("document.documentElement.scrollHeight"))
        page.set_viewport_size({"width": width, "height": max(height, min(tall, MAX_HEIGHT))})
        page.screenshot(path=str(self.folder / name), timeout=60_000)
        page.close()
        print(self.folder / name, flush=True)


def main(folder: Path, only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        loaded = load(Path(scratch))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox", "--disable-gpu"])
            _console(Camera(browser=browser, folder=folder, only=only), loaded)
            browser.close()
    if "voice".startswith(only) or only.startswith("voice"):
        voice.main(folder)


def _console(camera: Camera, loaded: Loaded) -> None:
    with serving(loaded) as gateway:
        fill(gateway)
        running = next(story for story in gateway.client.telemetry.traces.values() if story.state == "running")
        for name, path in {**paths(gateway), "request-running": f"/requests/{running.id}"}.items():
            camera.shoot(gateway, name, path)
        crowd(gateway)
        for name in LIVE_PAGES:
            camera.shoot(gateway, f"{name}-crowd", f"/{name}", ("light",))
    with serving(loaded) as gateway:
        gateway.client.show(FakeTelemetry())
        gateway.client.missing = [gateway.config.graph_declaration().stages[1].name]
        for name in LIVE_PAGES:
            camera.shoot(gateway, f"{name}-empty", f"/{name}", ("light",))
        camera.shoot(gateway, "request-unknown", "/requests/req-unknown")
        camera.shoot(gateway, "error-unknown", "/nothing")
        gateway.client.unreachable = RedisUnreachable("Redis does not answer (Connection refused)")
        for name in LIVE_PAGES:
            camera.shoot(gateway, f"{name}-away", f"/{name}", ("dark",))
        camera.shoot(gateway, "error-away", "/requests/req-1/older")
    with serving(read_only(loaded)) as gateway:
        fill(gateway)
        camera.shoot(gateway, "workers-read-only", "/workers")
    with serving(loaded, api_key="secret") as gateway:
        camera.shoot(gateway, "login", "/console/login")


def _settle(page: Page) -> None:
    """Until the page is connected, where it is one that connects."""
    if page.locator("#live").count():
        expect(page.locator("#link")).to_have_text("live")


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder", type=Path)
    words.add_argument("--only", default="", metavar="NAME")
    given = words.parse_args()
    main(given.folder, given.only)
