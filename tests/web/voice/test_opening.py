"""Push to talk while the microphone is opening, and sessions that the server ends."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.support import wait_until
from tests.web.voice.browsers import (
    MIC_RATE_HZ,
    Visit,
    ask,
    choose,
    js,
    start,
    wait_js,
)
from tests.web.voice.fake_server import RATE_HZ, TEXT, FakeVoiceServer, VoiceScript, tone

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

Hold = Callable[[Page], None]
STEADY = tone(60.0, 700.0, MIC_RATE_HZ, 0.4)
DELAY_MICROPHONE = """
() => {
  const { mediaDevices } = navigator;
  const ask = mediaDevices.getUserMedia.bind(mediaDevices);
  mediaDevices.getUserMedia = async (wanted) => {
    await new Promise((resolve) => (window.openMic = resolve));
    return (window.opened = await ask(wanted));
  };
  window.numBlocks = 0;
  fleetVoice.mic.addEventListener("block", () => (window.numBlocks += 1));
}
"""
"""Script that delays the microphone until the test calls `openMic`; `numBlocks` counts the
microphone's audio blocks.
"""


def open_with_push_to_talk(visit_with_mic: Visit) -> Page:
    """Open the Voice page with push to talk chosen and the microphone closed."""
    page = visit_with_mic("steady-hold", STEADY)
    expect(page.locator("#state")).to_have_text("Ready")
    page.evaluate(DELAY_MICROPHONE)
    choose(page, "turns", "push")
    page.locator("#talk-button").focus()
    return page


def key_down(page: Page) -> None:
    page.keyboard.down("Space")


def button_down(page: Page) -> None:
    page.locator("#talk-button").hover()
    page.mouse.down()


def release(page: Page) -> None:
    page.mouse.up()
    page.keyboard.up("Space")


@pytest.mark.parametrize("hold", [key_down, button_down])
def test_first_push_records_from_microphone_opening(
    visit_with_mic: Visit, server: FakeVoiceServer, hold: Hold
) -> None:
    page = open_with_push_to_talk(visit_with_mic)
    hold(page)
    expect(page.locator("#state")).to_have_text("Opening the microphone")
    js(page, "window.openMic()")
    expect(page.locator("#state")).to_have_text("Hearing you")
    wait_js(page, "window.numBlocks > 25")
    release(page)
    expect(page.locator(".turn.user .words")).to_have_text("what the user said")
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(page.locator(".reason")).to_have_count(0)
    received = server.connections[0].received
    first, commit = received.index("audio"), received.index("input_audio_buffer.commit")
    assert received[:first].count("session.update") >= 3, (
        "the rate of the microphone precedes its first sample"
    )
    assert server.rate_hz == js(page, "fleetVoice.mic.rateHz")
    assert received[first:commit].count("audio") > 25, "every block since the opening"
    assert (
        "input_audio_buffer.clear" in received[:first]
        and "input_audio_buffer.clear" not in received[first:]
    )


@pytest.mark.parametrize("hold", [key_down, button_down])
def test_push_released_before_microphone_opens_asks_to_repeat(
    visit_with_mic: Visit, server: FakeVoiceServer, hold: Hold
) -> None:
    page = open_with_push_to_talk(visit_with_mic)
    hold(page)
    expect(page.locator("#state")).to_have_text("Opening the microphone")
    release(page)
    expect(page.locator(".reason")).to_contain_text(
        "Nothing was recorded. Hold the button, or the space bar, again"
    )
    hold(page)
    expect(page.locator(".reason")).to_have_count(0)
    release(page)
    # The driver does not wait until the page has handled a key: if the microphone opened first, it
    # would record.
    expect(page.locator(".reason")).to_contain_text(
        "Nothing was recorded. Hold the button, or the space bar, again"
    )
    js(page, "window.openMic()")
    expect(page.locator("#state")).to_have_text("Hold to talk")
    expect(page.locator(".turn")).to_have_count(0)
    wait_js(page, "window.numBlocks > 10")
    assert not server.mic and not server.of_type("input_audio_buffer.commit")
    hold(page)
    expect(page.locator(".reason")).to_have_count(0)
    wait_until(lambda: len(server.mic) > 20, "audio of the second press")
    release(page)
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)


def test_talk_ended_during_microphone_opening_leaves_it_closed(
    visit_with_mic: Visit, server: FakeVoiceServer
) -> None:
    page = visit_with_mic("steady-hold", STEADY)
    expect(page.locator("#state")).to_have_text("Ready")
    page.evaluate(DELAY_MICROPHONE)
    page.locator("#talk-button").click()
    expect(page.locator("#state")).to_have_text("Opening the microphone")
    page.locator("#talk-button").click()
    expect(page.locator("#state")).to_have_text("Ready")
    js(page, "window.openMic()")
    wait_js(page, "window.opened?.getTracks().every((track) => track.readyState === 'ended')")
    assert not js(page, "fleetVoice.mic.on") and not server.mic


def end(server: FakeVoiceServer) -> None:
    """Close the connection as a gateway does when an operator ends the session."""
    server.call(
        lambda: server.connections[-1].websocket.close(1000, "an operator ended the session")
    )


def test_typing_continues_conversation_after_idle_end(
    visit_with_mic: Visit, server: FakeVoiceServer
) -> None:
    page = visit_with_mic("steady-hold", STEADY)
    expect(page.locator("#state")).to_have_text("Ready")
    ask(page, "my name is Ada")
    wait_js(page, "fleetVoice.player.totalPlayed > 0 && !fleetVoice.player.playing")

    async def idle() -> None:
        error = {
            "type": "invalid_request_error",
            "code": "session_idle",
            "message": "nothing was sent",
            "param": None,
        }
        await server.connections[-1].send("error", error=error)
        await server.connections[-1].websocket.close(
            1000, "invalid_request_error.session_idle: nothing was sent"
        )

    server.call(idle)
    expect(page.locator("#state")).to_have_text("Ended")
    expect(page.locator(".reason")).to_contain_text("This conversation was idle for too long")
    ask(page, "hello")
    wait_until(
        lambda: len(server.of_type("conversation.item.create")) == 4,
        "the turns so far, and the message",
    )
    texts = [
        event["item"]["content"][0]["text"]  # pyright: ignore
        for event in server.of_type("conversation.item.create")
    ]
    assert texts == ["my name is Ada", "my name is Ada", TEXT, "hello"]
    assert len(server.connections) == 2 and "session" not in server.connections[1].query
    expect(page.locator(".turn")).to_have_count(4)


def test_forced_end_closes_microphone_and_offers_talk_again(
    visit_with_mic: Visit, server: FakeVoiceServer
) -> None:
    server.script = VoiceScript(samples=tone(20.0), lead_s=20, stall_after=19 * RATE_HZ)
    page = visit_with_mic("steady-hold", STEADY)
    start(page)
    wait_until(lambda: len(server.mic) > 10, "audio")
    js(page, "window.track = fleetVoice.mic.stream.getTracks()[0]")
    end(server)
    expect(page.locator("#state")).to_have_text("Ended")
    expect(page.locator(".reason")).to_contain_text("An operator ended this conversation")
    expect(page.locator("#talk-label")).to_have_text("Talk again")
    expect(page.locator("#talk-button")).to_have_attribute("aria-pressed", "false")
    assert js(page, "window.track.readyState") == "ended" and not js(page, "fleetVoice.mic.on")
    wait_js(page, "!fleetVoice.player.playing")
    assert len(server.connections) == 1, "it does not reconnect by itself"
    num_blocks = len(server.mic)
    page.locator("#talk-button").click()
    wait_until(lambda: len(server.mic) > num_blocks + 10, "audio in another session")
    expect(page.locator(".reason")).to_have_count(0)
    expect(page.locator("#talk-label")).to_have_text("End talk")
    assert len(server.connections) == 2 and "session" not in server.connections[1].query


def test_forced_end_during_push_sends_nothing(
    visit_with_mic: Visit, server: FakeVoiceServer
) -> None:
    page = open_with_push_to_talk(visit_with_mic)
    page.keyboard.down("Space")
    expect(page.locator("#state")).to_have_text("Opening the microphone")
    end(server)
    expect(page.locator("#state")).to_have_text("Ended")
    js(page, "window.openMic()")
    wait_js(page, "window.opened?.getTracks().every((track) => track.readyState === 'ended')")
    page.keyboard.up("Space")
    expect(page.locator(".reason")).to_have_count(1)
    ask(page, "hello again")
    expect(page.locator(".turn.user .words")).to_have_text("hello again")
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(page.locator(".reason")).to_have_count(0)
    assert not server.mic and not server.of_type("input_audio_buffer.commit")
