"""`python -m tests.web.screenshots DIR`: PNG files of every console page, light and dark, for phone
and desktop.

The fleets are generated: a busy one, an empty one, one without Redis, one at its limits. The Voice
page connects to a fake server. `--only NAME`: only pages whose names begin with NAME. `--readme`:
only the two pictures of the README.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from playwright.sync_api import Browser, Page, expect, sync_playwright

from fleet.core.errors import RedisUnreachable
from tests.web.chromium import chromium_path
from tests.web.conftest import Loaded, ServedGateway, bounded, load, serving
from tests.web.console.busy_gateway import LIVE_PAGES, fill, paths
from tests.web.console.oversized_fleet import fill_to_limits
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible_answers import WORDS, add_answers
from tests.web.plausible_sessions import keep_sessions
from tests.web.voice import screenshots as voice
from web.realtime.session_views import decode_view

SIZES = {"phone": (390, 844), "desktop": (1440, 900)}
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
MAX_HEIGHT = 4000
"""Height limit of a screenshot in pixels; longer pages are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Camera:
    """Takes screenshots of pages. `only`: beginning of the names of the pages to include."""

    browser: Browser
    folder: Path
    only: str

    def shoot(
        self, gateway: ServedGateway, name: str, path: str, schemes: Sequence[Scheme] = SCHEMES
    ) -> None:
        for size in SIZES if name.startswith(self.only) else ():
            for scheme in schemes:
                self._shoot(gateway.url + path, f"{name}-{size}-{scheme}.png", size, scheme)

    def _shoot(self, url: str, name: str, size: str, scheme: Scheme) -> None:
        width, height = SIZES[size]
        page = self.browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        page.goto(url)
        _settle(page)
        tall = int(page.evaluate("document.documentElement.scrollHeight"))
        page.set_viewport_size({"width": width, "height": max(height, min(tall, MAX_HEIGHT))})
        page.screenshot(path=str(self.folder / name), timeout=60_000)
        page.close()
        print(self.folder / name, flush=True)


def main(folder: Path, only: str) -> None:
    with _browsing(folder) as (browser, loaded):
        _console(Camera(browser=browser, folder=folder, only=only), loaded)
    if "voice".startswith(only) or only.startswith("voice"):
        voice.main(folder)


def draw_readme_pictures(folder: Path) -> None:
    """Write `request.png` (an answer that a worker's death interrupted) and `voice.png` (the Voice
    page during an answer), as the README shows them.
    """
    with _browsing(folder) as (browser, loaded), serving(loaded) as gateway:
        fill(gateway)
        telemetry = gateway.client.telemetry
        trace = add_answers(telemetry, _encode(gateway, WORDS))["interrupted"]
        telemetry.traces[trace.id] = msgspec.structs.replace(
            trace, prompt_ids=_encode(gateway, "What is the opposite of hot?")
        )
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(f"{gateway.url}/requests/{trace.id}")
        _settle(page)
        page.screenshot(path=str(folder / "request.png"))
    voice.draw(folder / "voice.png", voice.speaking, 1200, 800)


def _encode(gateway: ServedGateway, text: str) -> tuple[int, ...]:
    return tuple(gateway.client.tokenizer.encode(text).ids)


@contextmanager
def _browsing(folder: Path) -> Iterator[tuple[Browser, Loaded]]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser, load(Path(scratch))
        browser.close()


def _console(camera: Camera, loaded: Loaded) -> None:
    with serving(loaded) as gateway:
        fill(gateway)
        running = next(
            trace for trace in gateway.client.telemetry.traces.values() if trace.state == "running"
        )
        for name, path in {**paths(gateway), "request-running": f"/requests/{running.id}"}.items():
            camera.shoot(gateway, name, path)
        answers = add_answers(
            gateway.client.telemetry, _encode(gateway, "The opposite of hot is cold.")
        )
        for name, trace in answers.items():
            camera.shoot(gateway, f"request-{name}", f"/requests/{trace.id}")
        camera.shoot(gateway, "requests-slowest", "/requests?order=slowest")
        _keep(gateway, [trace.id for trace in answers.values()])
        camera.shoot(gateway, "kept-some", "/kept")
        session = next(iter(gateway.client.voice.held))
        view = decode_view(gateway.client.voice.held[session].fields["view"])
        ended = keep_sessions(
            gateway.config.history_dir, gateway.client.graph, answers["fine"].id, view
        )
        camera.shoot(gateway, "sessions-kept", "/sessions")
        camera.shoot(gateway, "session-ended", f"/sessions/{ended[0]}")
        camera.shoot(gateway, "session-killed", f"/sessions/{ended[2]}")
        pair = f"/requests/{answers['slow'].id}/compare?with={answers['fine'].id}"
        camera.shoot(gateway, "request-compare", pair)
        calm_down(gateway.client.telemetry)
        camera.shoot(gateway, "now-calm", "/now")
        fill_to_limits(gateway)
        for name in LIVE_PAGES:
            camera.shoot(gateway, f"{name}-limits", f"/{name}", ("light",))
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
    with serving(bounded(loaded, read_only=True)) as gateway:
        fill(gateway)
        camera.shoot(gateway, "workers-read-only", "/workers")
    with serving(loaded, api_key="secret") as gateway:
        camera.shoot(gateway, "login", "/console/login")


def _keep(gateway: ServedGateway, requests: Sequence[str]) -> None:
    """Pin answers, and unpin all but the first."""
    for number, request in enumerate(requests):
        gateway.http.post(f"/v1/fleet/requests/{request}/pin").raise_for_status()
        if number:
            gateway.http.delete(f"/v1/fleet/requests/{request}/pin").raise_for_status()


def calm_down(telemetry: FakeTelemetry) -> None:
    """Remove every death, order, failure and refusal of the last hour."""
    telemetry.entries = telemetry.entries[:1]
    telemetry.points = [
        msgspec.structs.replace(
            point,
            ended={"finished": point.ended.get("finished", 0)} if point.ended else {},
            underruns=0,
        )
        for point in telemetry.points
    ]


def _settle(page: Page) -> None:
    """Wait until the live event stream of a page, if any, is connected."""
    if page.locator("#live").count():
        expect(page.locator("#link")).to_have_text("live")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    draw_readme_pictures(options.folder) if options.readme else main(options.folder, options.only)
