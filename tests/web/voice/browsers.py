"""Headless Chromium with a fake microphone on the Voice page, and what tests do with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, expect, sync_playwright

from tests.support import wait_until
from tests.web.chromium import chromium_path

MIC_RATE_HZ = 48_000
PATIENCE_MS = 40_000
"""Browsers are slow where many share a core; nothing waits so long that goes well."""
expect.set_options(timeout=PATIENCE_MS)
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--mute-audio",
    # sound must not need luck: the page starts it from the visitor's own key press
    "--autoplay-policy=document-user-activation-required",
)
FAKE_DEVICES = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
TAP = """
async (url) => {
  const { player } = window.fleetVoice;
  await player.context.audioWorklet.addModule(url);
  const tap = new AudioWorkletNode(player.context, "fleet-mic", { numberOfInputs: 1, outputChannelCount: [1] });
  window.tapped = [];
  tap.port.onmessage = ({ data }) => window.tapped.push(...new Int16Array(data.pcm));
  player.node.connect(tap).connect(player.context.destination);
}
"""


@dataclass(slots=True)
class Browsers:
    """Browsers by what their microphone hears; each is started once."""

    playwright: Playwright
    folder: Path
    open: dict[str, Browser] = field(default_factory=dict[str, Browser])

    def hearing(self, name: str, sound: NDArray[np.int16] | None, *extra: str) -> Browser:
        """Each page hears `sound` once from its beginning, then silence; None: there is no microphone."""
        if name not in self.open:
            flags = list(ARGS) + list(extra)
            if sound is not None:
                path = self.folder / f"{name}.wav"
                soundfile.write(str(path), sound, MIC_RATE_HZ, subtype="PCM_16")
                flags += [*FAKE_DEVICES, f"--use-file-for-fake-audio-capture={path}%noloop"]
            self.open[name] = self.playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=flags)
        return self.open[name]

    @staticmethod
    @contextmanager
    def started(folder: Path) -> "Iterator[Browsers]":
        with sync_playwright() as playwright:
            browsers = Browsers(playwright, folder)
            yield browsers
            for browser in browsers.open.values():
                browser.close()


@contextmanager
def visiting(browser: Browser, url: str, expected: Sequence[str] = (), **options: object) -> Iterator[Page]:
    """The open Voice page. What the browser complains of (a blocked script, an exception), if not `expected`, fails the test."""
    complaints: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error" and not any(words in message.text for words in ("WebSocket connection", *expected)):
            complaints.append(message.text)

    context: BrowserContext = browser.new_context(**options)  # pyright: ignore[reportArgumentType]
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", on_console)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    assert not complaints, complaints


def ask(page: Page, text: str = "hello") -> None:
    page.locator("#message").fill(text)
    page.locator("#message").press("Enter")


def js(page: Page, expression: str) -> object:
    """The page's own policy forbids what `wait_for_function` would evaluate inside it."""
    return page.evaluate(expression)


def wait_js(page: Page, condition: str, timeout_s: float = PATIENCE_MS / 1000) -> None:
    wait_until(lambda: js(page, condition), condition, timeout_s)


def tap(page: Page) -> None:
    """From now on `window.tapped` holds every sample that goes to the loudspeaker."""
    page.evaluate(TAP, str(js(page, "document.body.dataset.micWorklet")))


def tapped(page: Page, at_least: int) -> NDArray[np.int16]:
    """All that was played, once so many samples were and nothing more comes."""
    wait_js(page, f"tapped.length > {at_least} + 4800 && tapped.slice(-2400).every((sample) => sample === 0)")
    return np.asarray(js(page, "window.tapped"), np.int16)
