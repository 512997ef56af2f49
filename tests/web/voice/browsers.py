"""Headless Chromium with a fake microphone, and helpers for tests of the Voice page."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import soundfile
from numpy.typing import NDArray
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Playwright,
    expect,
    sync_playwright,
)

from tests.support import wait_until
from tests.web.chromium import chromium_path

MIC_RATE_HZ = 48_000
Visit = Callable[[str, NDArray[np.int16]], Page]
"""Type of the function that opens the Voice page with a microphone of a given name and audio."""
PATIENCE_MS = 40_000
"""Longest wait of a test in ms; a browser on a loaded machine is slow."""
expect.set_options(timeout=PATIENCE_MS)
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--mute-audio",
    # as real browsers do: audio starts only from a key press or click
    "--autoplay-policy=document-user-activation-required",
)
FAKE_DEVICES = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
TAP = """
async (url) => {
  const { player } = window.fleetVoice;
  await player.context.audioWorklet.addModule(url);
  const tap = new AudioWorkletNode(player.context, "fleet-mic", {
    numberOfInputs: 1, outputChannelCount: [1] });
  window.tapped = [];
  tap.port.onmessage = ({ data }) => window.tapped.push(...new Int16Array(data.pcm));
  player.node.connect(tap).connect(player.context.destination);
}
"""


@dataclass(slots=True)
class Browsers:
    """Running browsers by the audio of their fake microphone; each browser is started once."""

    playwright: Playwright
    folder: Path
    open: dict[str, Browser] = field(default_factory=dict[str, Browser])

    def with_microphone(self, name: str, audio: NDArray[np.int16] | None, *extra: str) -> Browser:
        """Return a browser whose microphone plays `audio` once and then silence; with None it has
        no microphone.
        """
        if name not in self.open:
            flags = list(ARGS) + list(extra)
            if audio is not None:
                path = self.folder / f"{name}.wav"
                soundfile.write(str(path), audio, MIC_RATE_HZ, subtype="PCM_16")
                flags += [*FAKE_DEVICES, f"--use-file-for-fake-audio-capture={path}%noloop"]
            self.open[name] = self.playwright.chromium.launch(
                executable_path=chromium_path(), headless=True, args=flags
            )
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
def visiting(
    browser: Browser, url: str = "about:blank", expected: Sequence[str] = (), **options: object
) -> Iterator[Page]:
    """Open a page. Browser errors (a blocked script, an exception) fail the test unless `expected`
    lists a part of their text.
    """
    complaints: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error" and not any(
            text in message.text for text in ("WebSocket connection", *expected)
        ):
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
    """Evaluate a JavaScript expression from outside the page, whose content security policy forbids
    Playwright's `wait_for_function`.
    """
    return page.evaluate(expression)


def wait_js(page: Page, condition: str, timeout_s: float = PATIENCE_MS / 1000) -> None:
    wait_until(lambda: js(page, condition), condition, timeout_s)


def tap(page: Page) -> None:
    """From now on, record every sample sent to the loudspeaker, in `window.tapped`."""
    page.evaluate(TAP, str(js(page, "document.body.dataset.micWorklet")))


def tapped(page: Page, at_least: int) -> NDArray[np.int16]:
    """Return all samples recorded by `tap`, once there are at least `at_least` samples and silence
    follows.
    """
    wait_js(
        page,
        f"tapped.length > {at_least} + 4800 && tapped.slice(-2400).every((sample) => sample === 0)",
    )
    return np.asarray(js(page, "window.tapped"), np.int16)


def start(page: Page) -> None:
    """Begin a voice conversation, once the page is ready."""
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#talk-button").click()


PRESS_KEY = """
() => {
  for (const type of ["keydown", "keyup"]) {
    const settings = { key: " ", code: "Space", bubbles: true, cancelable: true };
    document.body.dispatchEvent(new KeyboardEvent(type, settings));
  }
}
"""
"""Script that sends key-down and key-up at one time. Between two separate events of the browser
driver, a busy machine may let pass the time of a long press.
"""


def hold_to_talk(page: Page) -> None:
    """Choose push to talk, open the microphone, and focus the talk button, so that the space bar
    holds it.

    The microphone is opened without a click: if it opened between the press and the release, the
    click would record.
    """
    choose(page, "turns", "push")
    expect(page.locator("#state")).to_have_text("Ready")
    page.evaluate(PRESS_KEY)
    expect(page.locator("#state")).to_have_text("Hold to talk")
    page.locator("#talk-button").focus()


def choose(page: Page, field: str, value: str) -> None:
    """Select a value in the panel Session, and fold the panel again."""
    page.locator("#session-fold > summary").click()
    page.locator(f"#{field}").select_option(value)
    page.locator("#session-fold > summary").click()


def note_states(page: Page) -> None:
    """From now on, record every state that the page shows, since a test that polls may miss a short
    one.
    """
    js(
        page,
        """() => {
          const element = document.getElementById("state");
          window.states = [element.textContent];
          const observer = new MutationObserver(() => states.push(element.textContent));
          observer.observe(element, { childList: true, characterData: true, subtree: true });
        }""",
    )


def noted_states(page: Page) -> list[str]:
    """Return the states recorded since `note_states`, in order."""
    return cast("list[str]", js(page, "states"))
