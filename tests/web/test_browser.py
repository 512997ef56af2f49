"""The console in a real browser: a typed message is answered in text and in sound that is really played."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from fleet.core.errors import EngineError, RedisUnreachable
from tests.support import wait_until
from tests.web.checkpoint import EXAMPLES
from tests.web.chromium import chromium_path
from tests.web.conftest import Gateway
from tests.web.fake_client import RATE_HZ, Script

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--mute-audio",
    # sound must not need luck: the page starts it from the visitor's own key press
    "--autoplay-policy=document-user-activation-required",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, gateway: Gateway) -> Iterator[Page]:
    """The open console. Whatever the browser complains of (a blocked script, an exception) fails the test."""
    complaints: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(message.text)

    page = browser.new_page()
    page.set_default_timeout(10_000)
    page.on("console", on_console)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(gateway.url)
    expect(page.locator("#link")).to_have_text("connected")
    yield page
    page.close()
    assert not complaints, complaints


def ask(page: Page, text: str = "hello") -> None:
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")


def number(page: Page, expression: str) -> float:
    return float(page.evaluate(expression))


def wait_js(page: Page, condition: str) -> None:
    """The page's own policy forbids what `wait_for_function` would evaluate inside it."""
    wait_until(lambda: page.evaluate(condition), condition)


def test_a_typed_message_is_answered_in_text_and_sound(page: Page, gateway: Gateway) -> None:
    gateway.client.script = Script(num_samples=RATE_HZ, gap_s=0.01)
    ask(page)
    expect(page.locator(".turn.user .words")).to_have_text("hello")
    expect(page.locator(".turn.assistant .words")).to_have_text(Script().text)
    expect(page.locator(".turn.assistant .notes")).to_contain_text("1.0 s of speech")
    wait_js(page, "window.fleetPlayer.played > 0")
    # all of it is played, no sample twice, at the level of the sine that was sent
    wait_js(page, f"window.fleetPlayer.played === {RATE_HZ} && !window.fleetPlayer.playing")
    assert 0.15 < number(page, "window.fleetPlayer.peakRms") < 0.25
    expect(page.locator("#played")).to_have_text("played 1.0 s")
    spec, _ = gateway.client.submitted[0]
    assert spec.params["voice"] == page.locator("#voice").input_value()


def test_a_suggestion_is_asked_by_a_click(page: Page, gateway: Gateway) -> None:
    suggestions = page.locator(".example")
    expect(suggestions).to_have_text(EXAMPLES)
    suggestions.last.click()
    expect(page.locator(".turn.user .words")).to_have_text(EXAMPLES[-1])
    expect(page.locator(".turn.assistant .words")).to_have_text(Script().text)
    expect(suggestions).to_have_count(0)
    page.locator("#clear").click()
    expect(suggestions).to_have_text(EXAMPLES)


def test_the_strip_follows_the_request(page: Page, gateway: Gateway) -> None:
    expect(page.locator(".stage h3")).to_have_text(["thinker", "talker", "code2wav"])
    gateway.client.script = Script(stall_at=6)
    ask(page)
    expect(page.locator("#stage-thinker .task")).to_contain_text("running")
    expect(page.locator("#edge-text .num")).to_have_text("3/3")
    expect(page.locator("#stage-talker .up")).to_contain_text("1/16 running")
    page.locator("#stop").click()
    expect(page.locator(".story")).to_contain_text("aborted")
    gateway.client.missing = ["talker"]
    expect(page.locator("#trouble")).to_contain_text("No worker for talker")
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    expect(page.locator("#trouble")).to_have_text("no Redis answers")


def test_stop_silences_at_once_and_aborts(page: Page, gateway: Gateway) -> None:
    # ten seconds of sound lie in the player when the button is pressed
    gateway.client.script = Script(num_samples=10 * RATE_HZ, samples_per_chunk=10 * RATE_HZ, stall_at=3)
    ask(page)
    wait_js(page, "window.fleetPlayer.played > 2400")
    page.locator("#stop").click()
    wait_js(page, "window.fleetPlayer.buffered === 0 && !window.fleetPlayer.playing")
    assert number(page, "window.fleetPlayer.played") < 9 * RATE_HZ
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted, "the abort")
    expect(page.locator(".turn.assistant .notes")).to_contain_text("stopped")
    gateway.client.script = Script()
    ask(page, "and now?")
    expect(page.locator(".turn.assistant .words").last).to_have_text(Script().text)
    roles = len(gateway.client.submitted)
    assert roles == 2


def test_a_new_question_interrupts_the_answer(page: Page, gateway: Gateway) -> None:
    gateway.client.script = Script(stall_at=4)
    ask(page, "first")
    expect(page.locator(".turn.assistant .words")).not_to_be_empty()
    gateway.client.script = Script(text="second answer")
    ask(page, "second")
    expect(page.locator(".turn.assistant .words").last).to_have_text("second answer")
    wait_until(lambda: [s.aborted for s in gateway.client.streams.values()][0], "the abort of the first")


def test_text_only_plays_nothing(page: Page, gateway: Gateway) -> None:
    page.locator("#voice").select_option("text only")
    ask(page)
    expect(page.locator(".turn.assistant .words")).to_have_text(Script().text)
    assert gateway.client.submitted[0][0].outputs == ("text",)


def test_a_failure_is_shown_with_its_reason(page: Page, gateway: Gateway) -> None:
    gateway.client.script = Script(fail_at=4, failure=EngineError("the engine ran out of memory"))
    ask(page)
    expect(page.locator("#error")).to_have_text("the engine ran out of memory")
    gateway.client.script = Script()
    ask(page)
    expect(page.locator(".turn.assistant .words").last).to_have_text(Script().text)
    expect(page.locator("#error")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 780)])
def test_nothing_overflows(
    browser: Browser, gateway: Gateway, scheme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    width, height = size
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # pyright: ignore[reportArgumentType]
    )
    page.goto(gateway.url)
    ask(page, "How do the stages work together, and what does each of them send to the next?")
    expect(page.locator(".turn.assistant .notes")).to_contain_text("tokens")
    expect(page.locator("#edge-audio .num")).to_have_text(re.compile("7/7"))
    assert number(page, "document.documentElement.scrollWidth") <= width
    assert page.locator("#send").is_visible() or page.locator("#stop").is_visible()
    page.screenshot(path=str(tmp_path / f"console-{scheme}-{width}.png"))
    page.close()
