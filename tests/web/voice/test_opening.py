"""Push to talk while the microphone still opens, and a session that an operator ends."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Page, expect

from tests.support import wait_until
from tests.web.voice.browsers import MIC_RATE_HZ, ask, js, wait_js
from tests.web.voice.fake_server import RATE_HZ, TEXT, Double, Script, tone

Visit = Callable[[str, NDArray[np.int16]], Page]
Hold = Callable[[Page], None]
STEADY = tone(60.0, 700.0, MIC_RATE_HZ, 0.4)
HELD_BACK = """
() => {
  const { mediaDevices } = navigator;
  const ask = mediaDevices.getUserMedia.bind(mediaDevices);
  mediaDevices.getUserMedia = async (wanted) => {
    await new Promise((resolve) => (window.letMicOpen = resolve));
    return (window.opened = await ask(wanted));
  };
  window.numBlocks = 0;
  fleetVoice.mic.addEventListener("block", () => (window.numBlocks += 1));
}
"""
"""The microphone opens once the test says so; every block that it gives is counted."""


def pushing(speaker: Visit) -> Page:
    """Push to talk, the microphone closed as yet."""
    page = speaker("steady-hold", STEADY)
    expect(page.locator("#state")).to_have_text("Ready")
    page.evaluate(HELD_BACK)
    page.locator("#choices summary").click()
    page.locator("#push-to-talk").check()
    page.locator("#choices summary").click()
    page.locator("#talk-button").focus()
    return page


def key_down(page: Page) -> None:
    page.keyboard.down("Space")


def button_down(page: Page) -> None:
    page.locator("#talk-button").hover()
    page.mouse.down()


def let_go(page: Page) -> None:
    page.mouse.up()
    page.keyboard.up("Space")


@pytest.mark.parametrize("hold", [key_down, button_down])
def test_first_hold_is_heard_from_the_opening_of_the_microphone(speaker: Visit, double: Double, hold: Hold) -> None:
    page = pushing(speaker)
    hold(page)
    expect(page.locator("#state")).to_have_text("Opening the microphone")
    js(page, "window.letMicOpen()")
    expect(page.locator("#state")).to_have_text("Hearing you")
    wait_js(page, "window.numBlocks > 25")
    let_go(page)
    expect(page.locator(".turn.user .words")).to_have_text("what the user said")
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(page.locator(".reason")).to_have_count(0)
    came = double.connections[0].came
    first, commit = came.index("sound"), came.index("input_audio_buffer.commit")
    assert came[:first].count("session.update") >= 3, "the rate of the microphone is known before its first sample"
    assert double.rate_hz == js(page, "fleetVoice.mic.rateHz")
    assert came[first:commit].count("sound") > 25, "every block since it opened"
    assert "input_audio_buffer.clear" in came[:first] and "input_audio_buffer.clear" not in came[first:]


@pytest.mark.parametrize("hold", [key_down, button_down])
def test_hold_that_ends_before_the_microphone_opens_asks_to_hold_again(speaker: Visit, double: Double, hold: Hold) -> None:
    page = pushing(speaker)
    hold(page)
    expect(page.locator("#state")).to_have_text("Opening the microphone")
    let_go(page)
    expect(page.locator(".reason")).to_contain_text("Nothing was recorded. Hold the button, or the space bar, again")
    hold(page)
    let_go(page)
    js(page, "window.letMicOpen()")
    expect(page.locator("#state")).to_have_text("Hold to talk")
    expect(page.locator(".turn")).to_have_count(0)
    wait_js(page, "window.numBlocks > 10")
    assert not double.mic and not double.of_type("input_audio_buffer.commit")
    hold(page)
    expect(page.locator(".reason")).to_have_count(0)
    wait_until(lambda: len(double.mic) > 20, "sound of the second hold")
    let_go(page)
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)


def test_talk_that_ends_while_the_microphone_opens_leaves_it_closed(speaker: Visit, double: Double) -> None:
    page = speaker("steady-hold", STEADY)
    expect(page.locator("#state")).to_have_text("Ready")
    page.evaluate(HELD_BACK)
    page.locator("#talk-button").click()
    expect(page.locator("#state")).to_have_text("Opening the microphone")
    page.locator("#talk-button").click()
    expect(page.locator("#state")).to_have_text("Ready")
    js(page, "window.letMicOpen()")
    wait_js(page, "window.opened?.getTracks().every((track) => track.readyState === 'ended')")
    assert not js(page, "fleetVoice.mic.on") and not double.mic


def end(double: Double) -> None:
    """As a gateway does where an operator forces the end."""
    double.call(lambda: asyncio.ensure_future(double.connections[-1].websocket.close(1000, "an operator ended the session")))


def test_idle_end_is_shown_as_such_and_typing_continues_the_conversation(speaker: Visit, double: Double) -> None:
    page = speaker("steady-hold", STEADY)
    expect(page.locator("#state")).to_have_text("Ready")
    ask(page, "my name is Ada")
    wait_js(page, "fleetVoice.player.totalPlayed > 0 && !fleetVoice.player.playing")

    async def idle() -> None:
        error = {"type": "invalid_request_error", "code": "session_idle", "message": "nothing was sent", "param": None}
        await double.connections[-1].send("error", error=error)
        await double.connections[-1].websocket.close(1000, "invalid_request_error.session_idle: nothing was sent")

    double.call(lambda: asyncio.ensure_future(idle()))
    expect(page.locator("#state")).to_have_text("Ended")
    expect(page.locator(".reason")).to_contain_text("This conversation was idle for too long")
    ask(page, "hello")
    wait_until(lambda: len(double.of_type("conversation.item.create")) == 4, "the turns so far, and the message")
    said = [event["item"]["content"][0]["text"] for event in double.of_type("conversation.item.create")]  # pyright: ignore
    assert said == ["my name is Ada", "my name is Ada", TEXT, "hello"]
    assert len(double.connections) == 2 and "session" not in double.connections[1].query
    expect(page.locator(".turn")).to_have_count(4)


def test_forced_end_closes_the_microphone_and_offers_to_talk_again(speaker: Visit, double: Double) -> None:
    double.script = Script(samples=tone(20.0), lead_s=20, stall_after=19 * RATE_HZ)
    page = speaker("steady-hold", STEADY)
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#talk-button").click()
    wait_until(lambda: len(double.mic) > 10, "sound")
    js(page, "window.track = fleetVoice.mic.stream.getTracks()[0]")
    end(double)
    expect(page.locator("#state")).to_have_text("Ended")
    expect(page.locator(".reason")).to_contain_text("An operator ended this conversation")
    expect(page.locator("#talk-label")).to_have_text("Talk again")
    expect(page.locator("#talk-button")).to_have_attribute("aria-pressed", "false")
    assert js(page, "window.track.readyState") == "ended" and not js(page, "fleetVoice.mic.on")
    wait_js(page, "!fleetVoice.player.playing")
    assert len(double.connections) == 1, "it does not come back by itself"
    heard = len(double.mic)
    page.locator("#talk-button").click()
    wait_until(lambda: len(double.mic) > heard + 10, "sound in another session")
    expect(page.locator(".reason")).to_have_count(0)
    expect(page.locator("#talk-label")).to_have_text("End talk")
    assert len(double.connections) == 2 and "session" not in double.connections[1].query


def test_forced_end_of_a_hold_sends_nothing_and_typing_begins_again(speaker: Visit, double: Double) -> None:
    page = pushing(speaker)
    page.keyboard.down("Space")
    expect(page.locator("#state")).to_have_text("Opening the microphone")
    end(double)
    expect(page.locator("#state")).to_have_text("Ended")
    js(page, "window.letMicOpen()")
    wait_js(page, "window.opened?.getTracks().every((track) => track.readyState === 'ended')")
    page.keyboard.up("Space")
    expect(page.locator(".reason")).to_have_count(1)
    page.locator("#message").fill("hello again")
    page.locator("#message").press("Enter")
    expect(page.locator(".turn.user .words")).to_have_text("hello again")
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(page.locator(".reason")).to_have_count(0)
    assert not double.mic and not double.of_type("input_audio_buffer.commit")
