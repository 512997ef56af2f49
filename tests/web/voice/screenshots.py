"""`python -m tests.web.voice.screenshots FOLDER`: pictures of the Voice page in each of its
states.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Page, expect

from tests.web.conftest import load
from tests.web.voice.browsers import (
    MIC_RATE_HZ,
    Browsers,
    ask,
    choose,
    visiting,
    wait_js,
)
from tests.web.voice.conftest import Site, serve_fake_voice
from tests.web.voice.fake_server import VoiceScript, tone

SIZES = ((390, 844), (1440, 900))
SCHEMES = ("light", "dark")
LONG = (
    "The thinker reads the question and writes the answer, the talker says how it sounds, and "
    "the last stage "
    "turns that into a wave. Each of them is a process of its own, and any of them may be lost."
)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * MIC_RATE_HZ), np.int16)


def voice(seconds: float) -> np.ndarray:
    return tone(seconds, 300.0, MIC_RATE_HZ, 0.4)


def idle(page: Page, site: Site) -> None:
    page.locator("#choices summary").focus()


def listening(page: Page, site: Site) -> None:
    page.locator("#talk-button").click()
    expect(page.locator("#state")).to_have_text("Listening")


def speaking(page: Page, site: Site) -> None:
    site.server.script = VoiceScript(
        text="It is the opposite of cold.", transcript="What is hot?", samples=tone(0.8)
    )
    page.locator("#talk-button").click()
    expect(page.locator(".latency:visible")).to_have_count(1)
    wait_js(page, "!fleetVoice.player.playing")
    site.server.script = VoiceScript(text=LONG, samples=tone(12.0))
    ask(page, "How do the stages work together?")
    wait_js(page, "fleetVoice.conversation.current.played > 2.5 * 24000", 30)


def interrupted(page: Page, site: Site) -> None:
    speaking(page, site)
    page.locator("#stop").click()
    expect(page.locator(".cut").last).not_to_be_empty()


def opening(page: Page, site: Site) -> None:
    page.evaluate("() => { navigator.mediaDevices.getUserMedia = () => new Promise(() => {}); }")
    choose(page, "turns", "push")
    page.locator("#talk-button").focus()
    page.keyboard.down("Space")
    expect(page.locator("#state")).to_have_text("Opening the microphone")


def opening_missed(page: Page, site: Site) -> None:
    opening(page, site)
    page.keyboard.up("Space")
    expect(page.locator(".reason")).to_be_visible()


def ended(page: Page, site: Site) -> None:
    speaking(page, site)
    connection = site.server.connections[-1]
    site.server.call(lambda: connection.websocket.close(1000, "an operator ended the session"))
    expect(page.locator("#state")).to_have_text("Ended")


def failed(page: Page, site: Site) -> None:
    message = "stage talker: no worker has served it for 30 s"
    site.server.script = VoiceScript(
        failure={"type": "server_error", "code": "no_worker", "message": message}
    )
    ask(page, "Are you there?")
    expect(page.locator(".reason")).to_be_visible()


def settings(page: Page, site: Site) -> None:
    listening(page, site)
    page.locator("#choices summary").click()


def session(page: Page, site: Site) -> None:
    choose(page, "turns", "server_vad")
    page.locator("#session-fold > summary").click()


def as_code(page: Page, site: Site) -> None:
    ask(page, "What is the opposite of hot?")
    expect(page.locator(".latency:visible")).to_have_count(1)
    page.locator("#code-fold > summary").click()
    page.locator("#language").select_option("python")


State = Callable[[Page, Site], None]
STATES: tuple[State, ...] = (
    idle,
    listening,
    speaking,
    interrupted,
    opening,
    opening_missed,
    ended,
    failed,
    settings,
    session,
    as_code,
)


@contextmanager
def _serving() -> Iterator[tuple[Browsers, Site]]:
    with (
        tempfile.TemporaryDirectory() as name,
        serve_fake_voice(load(Path(name))) as site,
        Browsers.started(Path(name)) as browsers,
    ):
        yield browsers, site


def draw(path: Path, state: State, width: int, height: int) -> None:
    """Write one picture of the Voice page in the given state, in the light theme."""
    with _serving() as (browsers, site):
        _draw(path, browsers, site, state, {"viewport": {"width": width, "height": height}})


def _draw(
    path: Path, browsers: Browsers, site: Site, state: State, options: dict[str, Any]
) -> None:
    site.server.reset()
    microphone = np.concatenate([silence(1.0), voice(1.2), silence(60.0)])
    with visiting(browsers.with_microphone("question", microphone), site.url, **options) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        state(page, site)
        page.screenshot(path=str(path))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with _serving() as (browsers, site):
        for state, (width, height), scheme in product(STATES, SIZES, SCHEMES):
            options: dict[str, Any] = {
                "viewport": {"width": width, "height": height},
                "color_scheme": scheme,
            }
            _draw(
                folder / f"voice-{state.__name__}-{scheme}-{width}.png",
                browsers,
                site,
                state,
                options,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
